"""Preference pairs labelled by a judge: SFT responses to training prompts, compared in all pairs.

The judge is also measured against people, on held-out pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.annotate.inputs import compare_with_people, load_principles, sample_sft
from stages.annotate.revisions import make_revisions, write_usage
from stages.lib.core.constitution import draw_principle
from stages.lib.core.errors import RondoError
from stages.lib.core.files import stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import PreferencePair, PromptRow, TrainingPrompt, read_rows
from stages.lib.core.types import Metrics
from stages.lib.core.user_inputs import user_files
from stages.lib.data.splits import check_prompts_not_in_eval_set, dedupe_prompts, shuffled
from stages.lib.judging.endpoint import EndpointJudge
from stages.lib.judging.jury import all_pairs, best_and_worst, between_orders, copeland_scores
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import (
    OUTCOME_BY_PREFERENCE,
    Comparison,
    PairwiseJudge,
    TwoOrderVerdict,
    judge_both_orders,
)

PROMPTS_PER_PROGRESS_LINE = 16


@dataclass(frozen=True)
class LabelledPrompt:
    """A prompt's pair, None if the judge prefers none of its responses; and all its comparisons."""

    pair: PreferencePair | None
    judgements: list[TwoOrderVerdict]


def label_with_judge(params: Params, round_: str) -> None:
    """Sample SFT responses to training prompts, have the judge compare them, write one pair per
    prompt.

    Raises:
        RondoError: the judge prefers no response, for any prompt.
    """
    # 1. inputs: training prompts only, since the responses are trained on
    data = stage_dir(round_, "prepare") / "data"
    prompt_rows = dedupe_prompts(read_rows(TrainingPrompt, data / "prompts_train.jsonl"))
    prompt_rows = shuffled(prompt_rows, params.seed)[: params.annotate.prompts]
    evaluation = read_rows(PromptRow, data / "eval_prompts.jsonl")
    check_prompts_not_in_eval_set(prompt_rows, evaluation)
    train_pairs = read_rows(PreferencePair, data / "pairs_train.jsonl")
    replayed = [pair for pair in train_pairs if "badcase" in pair]
    principles = load_principles(params)
    recorder, judge = MetricLogger("annotate", round_, len(prompt_rows)), load_judge(params)

    # 2. the judge against people comes first: if they disagree, the run can be stopped before the
    # more expensive labelling
    human_judgements, agreement = compare_with_people(judge, params, principles, recorder)

    # 3. responses of SFT
    prompts = [row["prompt"] for row in prompt_rows]
    sampled = sample_sft(prompts, params.annotate.samples, params, round_)

    # 4. the judge compares them; the best and the worst become a pair
    drawn = [draw_principle(principles, params.seed, row["id"]) for row in prompt_rows]
    labelled = label_all(judge, prompt_rows, sampled.by_prompt, drawn, recorder)
    pairs = [prompt.pair for prompt in labelled if prompt.pair]
    judgements = [judgement for prompt in labelled for judgement in prompt.judgements]
    consistency = between_orders([*human_judgements, *judgements])
    unparsable = sum(not judgement.readable for judgement in judgements)
    if not pairs:
        raise RondoError(
            f"annotate: the judge prefers no response for any of {len(prompt_rows)} prompts with"
            f" {params.annotate.samples} responses each ({unparsable} of {len(judgements)}"
            f" comparisons are unreadable; both orders agree in"
            f" {consistency['position_consistency']} of the others): check"
            " annotate.endpoint.rubric and model, or raise annotate.temperature for responses that"
            " differ more"
        )

    # 5. revisions by the constitution; write: replayed pairs stay, other human pairs do not
    revised = make_revisions(params, principles, recorder)
    metrics = {
        "annotator": "judge",
        **judge.describe(),
        "prompts": len(prompt_rows),
        "pairs": len(pairs),
        "ties": len(prompt_rows) - len(pairs),
        "replayed": len(replayed),
        "comparisons": len(judgements),
        "unparsable": unparsable,
        **consistency,
        **agreement,
        **judge.cost(),
        **revised.metrics,
    }
    write_usage(round_, judge.usage() | revised.usage)
    write_outputs([*pairs, *replayed], metrics, judge, sampled.template_hash, params, recorder)


def label_all(
    judge: PairwiseJudge,
    prompt_rows: Sequence[PromptRow],
    responses: Sequence[Sequence[str]],
    principles: Sequence[str | None],
    recorder: MetricLogger,
) -> list[LabelledPrompt]:
    """Label all prompts, with a progress line per `PROMPTS_PER_PROGRESS_LINE` of them.

    Args:
        responses, principles: of each prompt.
    """
    labelled: list[LabelledPrompt] = []
    for start in range(0, len(prompt_rows), PROMPTS_PER_PROGRESS_LINE):
        part = slice(start, start + PROMPTS_PER_PROGRESS_LINE)
        labelled += compare_all(judge, prompt_rows[part], responses[part], principles[part])
        pairs = sum(prompt.pair is not None for prompt in labelled)
        recorder.log_progress(len(labelled), f"{pairs} pairs")
    return labelled


def write_outputs(
    pairs: list[PreferencePair],
    metrics: Metrics,
    judge: PairwiseJudge,
    template_sha256: str,
    params: Params,
    recorder: MetricLogger,
) -> None:
    """Write the pairs, the manifest and the metrics."""
    folder, round_ = recorder.folder, recorder.round
    data = stage_dir(round_, "prepare") / "data"
    write_jsonl(folder / "data/pairs_train.jsonl", pairs)
    write_manifest(
        "annotate",
        round_,
        seed=params.seed,
        inputs=[
            *(data / f"{name}.jsonl" for name in ("prompts_train", "pairs_train", "pairs_eval")),
            *user_files(params)["constitution"],
        ],
        template_hash=template_sha256,
        **judge.describe(),
    )
    recorder.finish(metrics)
    print(
        f"[annotate@{round_}] {metrics['pairs']} pairs from {metrics['prompts']} prompts,"
        f" {metrics['replayed']} replayed",
        flush=True,
    )


def compare_all(
    judge: PairwiseJudge,
    prompt_rows: Sequence[PromptRow],
    responses: Sequence[Sequence[str]],
    principles: Sequence[str | None],
) -> list[LabelledPrompt]:
    """Label prompts by comparing all pairs of each one's distinct responses.

    All comparisons of a prompt have its principle, so that its pair has one reason.

    All comparisons go to the judge in one call, so that it can work on them in parallel.
    """
    distinct = [list(dict.fromkeys(texts)) for texts in responses]
    comparisons = [
        Comparison(row["prompt"], texts[i], texts[j], principle)
        for row, texts, principle in zip(prompt_rows, distinct, principles, strict=True)
        for i, j in all_pairs(len(texts))
    ]
    verdicts = iter(judge_both_orders(judge, comparisons))
    return [
        label_prompt(
            row,
            texts,
            [next(verdicts) for _ in all_pairs(len(texts))],
            judge.describe() | ({"principle": principle} if principle else {}),
        )
        for row, texts, principle in zip(prompt_rows, distinct, principles, strict=True)
    ]


def label_prompt(
    row: PromptRow,
    responses: Sequence[str],
    judgements: list[TwoOrderVerdict],
    judge_facts: Mapping[str, str | None],
) -> LabelledPrompt:
    """Make the pair of a prompt's responses, with its provenance under `annotator`."""
    by_pair = dict(zip(all_pairs(len(responses)), judgements, strict=True))
    votes = {pair: OUTCOME_BY_PREFERENCE[verdict.preference] for pair, verdict in by_pair.items()}
    scores = copeland_scores(len(responses), votes)
    extremes = best_and_worst(scores, votes)
    if not extremes:
        return LabelledPrompt(None, judgements)
    best, worst = extremes
    pair: PreferencePair = {
        "id": f"judge-{row['id']}",
        "prompt": row["prompt"],
        "chosen": responses[best],
        "rejected": responses[worst],
        "source": "judge",
        "annotator": {
            **judge_facts,
            "samples": list(responses),
            "scores": scores,
            "confidence": by_pair[min(extremes), max(extremes)].confidence,
        },
    }
    return LabelledPrompt(pair, judgements)


def load_judge(params: Params) -> PairwiseJudge:
    """The judge that annotate.judge names."""
    if params.annotate.judge is JudgeName.endpoint:
        return EndpointJudge(params.annotate.endpoint)
    return LexiconJudge(params.evaluate.tie_margin)
