"""What the primary judge says of held-out pairs, of endings, and of the texts that are shown."""

import random
from collections.abc import Sequence
from statistics import fmean

from stages.battery.metrics import PairScores, win
from stages.battery.probes import ProbeResult
from stages.battery.report import ScoredText
from stages.lib.core.params import Params
from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.core.types import Metrics
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.metrics.stats import wilson_interval


def text_scores(pairs: Sequence[PreferencePair], judge: PrimaryJudge) -> list[float] | None:
    """The judge's scores of each pair's chosen and rejected text; None if it only compares."""
    sides = [(row["prompt"], row[side]) for row in pairs for side in SIDES]
    return judge.scores([prompt for prompt, _ in sides], [text for _, text in sides])


def pair_agreement(
    pairs: Sequence[PreferencePair], scores: PairScores, judge: PrimaryJudge, params: Params
) -> Metrics:
    """Agreement of judge and reward model with the labels of the same pairs; a tie counts half.

    `judge_lead` is the accuracy of the reward model minus the judge's. `judge_accuracy_low` is the
    lower bound of Wilson's 95% interval, of the correct pairs and half the ties. A judge that only
    compares is asked about battery.pairs of the pairs, since each is a request.
    """
    indices = list(range(len(pairs)))
    if judge.only_compares:
        random.Random(params.seed).shuffle(indices)
        del indices[params.battery.pairs :]
    judged = [pairs[index] for index in indices]
    chosen, rejected = ([row[side] for row in judged] for side in SIDES)
    outcomes = judge.outcomes([row["prompt"] for row in judged], chosen, rejected)
    accuracy = fmean(outcomes)
    return {
        "judge_accuracy": accuracy,
        "judge_accuracy_low": wilson_interval(int(sum(outcomes)), len(judged))[0],
        "judge_lead": fmean(win(*scores[index]) for index in indices) - accuracy,
        "judged_pairs": len(judged),
    }


def ending_outcomes(
    results: Sequence[Sequence[ProbeResult]], judge: PrimaryJudge
) -> list[list[float] | None]:
    """For each ending, whether the judge, too, prefers the texts with it to their originals.

    None if the judge only compares: this would be a request per text.
    """
    if judge.only_compares:
        return [None] * len(results)
    return [
        judge.outcomes(
            [one.prompt for one in ending_results],
            [one.text for one in ending_results],
            [one.original for one in ending_results],
        )
        for ending_results in results
    ]


def with_judge_scores(rows: Sequence[ScoredText], judge: PrimaryJudge) -> list[ScoredText]:
    """The rows with the judge's score of each text, unless the judge only compares."""
    scores = judge.scores([row["prompt"] for row in rows], [row["text"] for row in rows])
    if scores is None:
        return list(rows)
    return [{**row, "judge_score": score} for row, score in zip(rows, scores, strict=True)]
