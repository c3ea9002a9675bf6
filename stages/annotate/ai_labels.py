"""Preference pairs labelled by a judge: SFT responses to training prompts, compared in all pairs.

The judge is also measured against people, on held-out pairs.
"""

from collections.abc import Mapping, Sequence

from stages.annotate.inputs import (
    compare_with_people,
    load_principles,
    sample_sft,
    training_prompts,
)
from stages.annotate.revisions import make_revisions, write_usage
from stages.lib.core.constitution import draw_principle
from stages.lib.core.errors import RondoError
from stages.lib.core.files import stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import PreferencePair, PromptRow, read_rows
from stages.lib.core.types import Metrics
from stages.lib.core.user_inputs import user_files
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
Labels = tuple[list[PreferencePair], list[TwoOrderVerdict]]  # pairs, and all comparisons


def label_with_judge(params: Params, round_: str) -> None:
    """Sample SFT responses to training prompts, have the judge compare them, write one pair per
    prompt.

    Raises:
        RondoError: the judge prefers no response, for any prompt.
    """
    # 1. inputs
    data = stage_dir(round_, "prepare") / "data"
    prompt_rows = training_prompts(params, round_, params.annotate.prompts)
    train_pairs = read_rows(PreferencePair, data / "pairs_train.jsonl")
    replayed = [pair for pair in train_pairs if "badcase" in pair]
    principles = load_principles(params)
    recorder, judge = MetricLogger("annotate", round_, len(prompt_rows)), load_judge(params)

    # 2. the judge against people comes first: if they disagree, the run can be stopped before the
    # more expensive labelling
    human_judgements, agreement = compare_with_people(judge, params, principles, recorder)

    # 3. responses of SFT
    prompts = [row["prompt"] for row in prompt_rows]
    responses, rendering = sample_sft(prompts, params.annotate.samples, params, round_)

    # 4. the judge compares them; the best and the worst become a pair
    drawn = [draw_principle(principles, params.seed, row["id"]) for row in prompt_rows]
    pairs, judgements = label_all(judge, prompt_rows, responses, drawn, recorder)
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
    revised, revision_usage = make_revisions(params, principles, recorder)
    metrics: Metrics = {
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
        **revised,
    }
    write_usage(round_, judge.usage() | revision_usage)
    write_jsonl(recorder.folder / "data/pairs_train.jsonl", [*pairs, *replayed])
    files = [data / f"{name}.jsonl" for name in ("prompts_train", "pairs_train", "pairs_eval")]
    write_manifest(
        "annotate",
        round_,
        seed=params.seed,
        inputs=[*files, *user_files(params)["constitution"]],
        template_hash=rendering,
        **judge.describe(),
    )
    recorder.finish(metrics)
    counts = f"{len(pairs)} pairs from {len(prompt_rows)} prompts, {len(replayed)} replayed"
    print(f"[annotate@{round_}] {counts}", flush=True)


def label_all(
    judge: PairwiseJudge,
    prompt_rows: Sequence[PromptRow],
    responses: Sequence[Sequence[str]],
    principles: Sequence[str | None],
    recorder: MetricLogger,
) -> Labels:
    """Label all prompts, with a progress line per `PROMPTS_PER_PROGRESS_LINE` of them."""
    pairs, judgements = list[PreferencePair](), list[TwoOrderVerdict]()
    for start in range(0, len(prompt_rows), PROMPTS_PER_PROGRESS_LINE):
        part = slice(start, start + PROMPTS_PER_PROGRESS_LINE)
        labels = compare_all(judge, prompt_rows[part], responses[part], principles[part])
        pairs += labels[0]
        judgements += labels[1]
        recorder.log_progress(min(part.stop, len(prompt_rows)), f"{len(pairs)} pairs")
    return pairs, judgements


def compare_all(
    judge: PairwiseJudge,
    prompt_rows: Sequence[PromptRow],
    responses: Sequence[Sequence[str]],
    principles: Sequence[str | None],
) -> Labels:
    """Label prompts by comparing all pairs of each one's distinct responses.

    All comparisons of a prompt have its principle, so that its pair has one reason. They go to the
    judge in one call, so that it can work on them in parallel.
    """
    distinct = [list(dict.fromkeys(texts)) for texts in responses]
    comparisons = [
        Comparison(row["prompt"], texts[i], texts[j], principle)
        for row, texts, principle in zip(prompt_rows, distinct, principles, strict=True)
        for i, j in all_pairs(len(texts))
    ]
    judgements = judge_both_orders(judge, comparisons)
    verdicts = iter(judgements)
    pairs = []
    for row, texts, principle in zip(prompt_rows, distinct, principles, strict=True):
        by_pair = {pair: next(verdicts) for pair in all_pairs(len(texts))}
        judge_facts = judge.describe() | ({"principle": principle} if principle else {})
        if pair := make_pair(row, texts, by_pair, judge_facts):
            pairs.append(pair)
    return pairs, judgements


def make_pair(
    row: PromptRow,
    responses: Sequence[str],
    judgements: Mapping[tuple[int, int], TwoOrderVerdict],
    judge_facts: Mapping[str, str | None],
) -> PreferencePair | None:
    """The best and the worst of a prompt's responses, with their provenance under `annotator`; None
    if the judge prefers none.
    """
    votes = {pair: OUTCOME_BY_PREFERENCE[one.preference] for pair, one in judgements.items()}
    scores = copeland_scores(len(responses), votes)
    extremes = best_and_worst(scores, votes)
    if not extremes:
        return None
    best, worst = extremes
    return {
        "id": f"judge-{row['id']}",
        "prompt": row["prompt"],
        "chosen": responses[best],
        "rejected": responses[worst],
        "source": "judge",
        "annotator": {
            **judge_facts,
            "samples": list(responses),
            "scores": scores,
            "confidence": judgements[min(extremes), max(extremes)].confidence,
        },
    }


def load_judge(params: Params) -> PairwiseJudge:
    """The judge that annotate.judge names."""
    if params.annotate.judge is JudgeName.endpoint:
        return EndpointJudge(params.annotate.endpoint)
    return LexiconJudge(params.evaluate.tie_margin)
