"""What labels and revisions start from: principles, agreement with people, responses of SFT."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.lib.core.constitution import draw_principle, read_principles
from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import PreferencePair, read_rows
from stages.lib.core.types import Metrics, Prompt
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.data.splits import shuffled
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


def compare_with_people(
    judge: PairwiseJudge, params: Params, principles: Sequence[str], recorder: MetricLogger
) -> tuple[list[TwoOrderVerdict], Metrics]:
    """Judge at most annotate.agreement_pairs held-out pairs, each by its principle.

    Returns:
        (the verdicts, with people's choice as response A; metrics: `human_agreement`, and with a
        constitution also `human_agreement_by_principle`, by the number of the principle from 1)
    """
    path = stage_dir(recorder.round, "prepare") / "data/pairs_eval.jsonl"
    rows = read_rows(PreferencePair, path)
    rows = shuffled(rows, params.seed)[: params.annotate.agreement_pairs]
    drawn = [draw_principle(principles, params.seed, row["id"]) for row in rows]
    verdicts = judge_both_orders(
        judge,
        [
            Comparison(row["prompt"], row["chosen"], row["rejected"], principle)
            for row, principle in zip(rows, drawn, strict=True)
        ],
    )
    agreement = human_agreement(verdicts)
    recorder.log_progress(
        0,
        f"agrees with people on {agreement['rate'] or 0:.2f} of {agreement['pairs']} pairs;"
        f" {agreement['ties']} ties",
    )
    metrics: Metrics = {"human_agreement": agreement}
    if principles:
        metrics["human_agreement_by_principle"] = {
            str(number): human_agreement(
                [verdict for verdict, own in zip(verdicts, drawn, strict=True) if own == principle]
            )
            for number, principle in enumerate(principles, 1)
        }
    return verdicts, metrics


@dataclass(frozen=True)
class SftTexts:
    """Texts of the SFT model."""

    by_prompt: list[list[str]]
    template_hash: str  # how the prompts were rendered, for manifests


def sample_sft(prompts: Sequence[Prompt], samples: int, params: Params, round_: str) -> SftTexts:
    """Sample so many SFT responses per prompt, at annotate.temperature.

    Raises:
        BadInput: the SFT model was trained with another template.
    """
    setup_torch(params)
    sft = stage_dir(round_, "sft")
    tokenizer = load_tokenizer(sft / "model")
    check_template(sft / "manifest.json", tokenizer, params.prepare.prompt_format)
    respond = responder(params, tokenizer, temperature=params.annotate.temperature)
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    responses = respond(load_causal_lm(sft / "model", params.model), repeated, params.seed)
    texts = [response.text for response in responses]
    return SftTexts(
        [texts[start : start + samples] for start in range(0, len(texts), samples)],
        template_hash(tokenizer, params.prepare.prompt_format),
    )
