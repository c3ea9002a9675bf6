"""What labels and revisions start from: principles, agreement with people, responses of SFT."""

from collections.abc import Sequence
from pathlib import Path

from stages.lib.core.constitution import draw_principle, read_principles
from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import PreferencePair, PromptRow, TrainingPrompt, read_rows
from stages.lib.core.types import Metrics, Prompt
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.data.splits import check_prompts_not_in_eval_set, dedupe_prompts, shuffled
from stages.lib.judging.jury import human_agreement
from stages.lib.judging.pairwise import (
    Comparison,
    PairwiseJudge,
    TwoOrderVerdict,
    judge_both_orders,
)
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.responses import responder


def load_principles(params: Params) -> list[str]:
    """The principles of annotate.constitution; [] without one.

    Raises:
        BadInput: the file is missing or empty, or has changed since the run began.
    """
    check_unchanged("constitution", params)
    return read_principles(Path(named)) if (named := params.annotate.constitution) else []


def training_prompts(params: Params, round_: str, number: int) -> list[TrainingPrompt]:
    """At most `number` distinct training prompts, at random; their responses are trained on.

    Raises:
        BadInput: one is an evaluation prompt.
    """
    data = stage_dir(round_, "prepare") / "data"
    rows = dedupe_prompts(read_rows(TrainingPrompt, data / "prompts_train.jsonl"))
    rows = shuffled(rows, params.seed)[:number]
    check_prompts_not_in_eval_set(rows, read_rows(PromptRow, data / "eval_prompts.jsonl"))
    return rows


def compare_with_people(
    judge: PairwiseJudge, params: Params, principles: Sequence[str], recorder: MetricLogger
) -> tuple[list[TwoOrderVerdict], Metrics]:
    """Judge at most annotate.agreement_pairs held-out pairs, each by its principle. People labelled
    them, and nothing is trained on them.

    Returns:
        (the verdicts, with people's choice as response A; metrics: `human_agreement`, and with a
        constitution also `human_agreement_by_principle`, by the number of the principle from 1)
    """
    path = stage_dir(recorder.round, "prepare") / "data/pairs_eval.jsonl"
    rows = shuffled(read_rows(PreferencePair, path), params.seed)[: params.annotate.agreement_pairs]
    drawn = [draw_principle(principles, params.seed, row["id"]) for row in rows]
    comparisons = [
        Comparison(row["prompt"], row["chosen"], row["rejected"], principle)
        for row, principle in zip(rows, drawn, strict=True)
    ]
    verdicts = judge_both_orders(judge, comparisons)
    agreement = human_agreement(verdicts)
    share = f"agrees with people on {agreement['rate'] or 0:.2f} of {agreement['pairs']} pairs"
    recorder.log_progress(0, f"{share}; {agreement['ties']} ties")
    metrics: Metrics = {"human_agreement": agreement}
    if principles:
        metrics["human_agreement_by_principle"] = {
            str(number): human_agreement(
                [verdict for verdict, own in zip(verdicts, drawn, strict=True) if own == principle]
            )
            for number, principle in enumerate(principles, 1)
        }
    return verdicts, metrics


def sample_sft(
    prompts: Sequence[Prompt], samples: int, params: Params, round_: str
) -> tuple[list[list[str]], str]:
    """So many SFT responses per prompt, at annotate.temperature; and how the prompts were rendered,
    for manifests.

    Raises:
        BadInput: the SFT model was trained with another template.
    """
    setup_torch(params)
    sft, prompt_format = stage_dir(round_, "sft"), params.prepare.prompt_format
    tokenizer = load_tokenizer(sft / "model")
    check_template(sft / "manifest.json", tokenizer, prompt_format)
    respond = responder(params, tokenizer, temperature=params.annotate.temperature)
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    responses = respond(load_causal_lm(sft / "model", params.model), repeated, params.seed)
    texts = [response.text for response in responses]
    by_prompt = [texts[start : start + samples] for start in range(0, len(texts), samples)]
    return by_prompt, template_hash(tokenizer, prompt_format)
