"""Numbers from scores.

A pair's outcome is 1 if the chosen text scores higher, 0.5 for a tie, else 0.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from stages.lib.core.files import metric_name
from stages.lib.core.params import Params
from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.core.types import Metrics
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.metrics.stats import (
    connected_groups,
    paired_bootstrap,
    partial_correlation,
    pearson,
    wilson_interval,
)
from stages.lib.metrics.text import alike_in_length

MIN_SLICE_PAIRS = 30  # the accuracy of a smaller slice is too uncertain to be the worst one
Rate = dict[str, float | int | None]
PairScores = list[tuple[float, float]]  # per pair: the scores of chosen and rejected


def win(a: float, b: float) -> float:
    return 1.0 if a > b else 0.5 if a == b else 0.0


def rate(outcomes: Sequence[float], name: str, count_name: str) -> Rate:
    """The mean outcome with Wilson's 95% interval, and the number of outcomes.

    With ties the number of wins is not whole: the interval then spans those of both roundings.
    Null if there are no outcomes.
    """
    total, wins = len(outcomes), sum(outcomes)
    if not total:
        return {name: None, "low": None, "high": None, count_name: 0}
    low, _ = wilson_interval(math.floor(wins), total)
    _, high = wilson_interval(math.ceil(wins), total)
    return {name: wins / total, "low": low, "high": high, count_name: total}


def highest_rate(rates: Iterable[Rate], name: str = "rate") -> float | None:
    values = (rate[name] for rate in rates)
    return max((value for value in values if value is not None), default=None)


def pair_metrics(
    pairs: list[PreferencePair],
    scores: PairScores,
    judge_scores: Sequence[float] | None,
    params: Params,
) -> Metrics:
    """Accuracy on held-out pairs, and the correlation of score and length.

    Accuracy is reported per slice, and over all pairs with an interval that resamples groups of
    pairs: pairs that share a text are not independent. The partial correlation removes the label
    and, if the judge gives any, its scores of the texts: of each pair chosen, then rejected.
    """
    outcomes = [win(chosen, rejected) for chosen, rejected in scores]
    accuracy = {
        group: {
            name: rate([outcomes[index] for index in indices], "accuracy", "pairs")
            for name, indices in indices_by_slice.items()
        }
        for group, indices_by_slice in slice_indices(pairs).items()
    }
    clusters = [
        [outcomes[index] for index in indices]
        for indices in connected_groups([text_keys(row) for row in pairs])
    ]
    _, low, high = paired_bootstrap(clusters, params.evaluate.bootstrap_resamples, params.seed)
    sides = [(row, side) for row in pairs for side in SIDES]
    labels = [float(side == "chosen") for _, side in sides]
    text_scores = [score for both in scores for score in both]
    lengths = [float(len(row[side])) for row, side in sides]
    held_fixed = [labels] if judge_scores is None else [labels, judge_scores]
    return {
        "accuracy": accuracy,
        "worst_slice": lowest_accuracy(accuracy, "accuracy"),
        "worst_slice_low": lowest_accuracy(accuracy, "low"),
        "accuracy_clustered_low": low,
        "accuracy_clustered_high": high,
        "length_correlation": pearson(text_scores, lengths),
        "length_correlation_partial": partial_correlation(text_scores, lengths, held_fixed),
    }


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


def slice_indices(pairs: Sequence[PreferencePair]) -> dict[str, dict[str, list[int]]]:
    """Indices of pairs as {group: {slice: indices}}, without empty slices.

    Groups: length in characters, source, and tercile of the label margin.
    """
    margins = [row["margin"] for row in pairs if "margin" in row]
    groups: dict[str, Callable[[PreferencePair], str | None]] = {
        "length": lambda row: by_length(row["chosen"], row["rejected"]),
        "source": lambda row: metric_name(row.get("source", "unknown")),
    }
    if margins:
        groups["margin"] = margin_tercile(margins)
    indices: dict[str, dict[str, list[int]]] = {group: {} for group in groups}
    for index, row in enumerate(pairs):
        for group, slice_name in groups.items():
            if name := slice_name(row):
                indices[group].setdefault(name, []).append(index)
    return indices


def by_length(chosen: str, rejected: str) -> str:
    if alike_in_length(chosen, rejected):
        return "alike"
    return "chosen_shorter" if len(chosen) < len(rejected) else "chosen_longer"


def margin_tercile(margins: Sequence[float]) -> Callable[[PreferencePair], str | None]:
    """A function from a pair to the tercile of its margin; equal margins are in one tercile."""
    low, high = np.quantile(margins, [1 / 3, 2 / 3])

    def tercile(row: PreferencePair) -> str | None:
        if "margin" not in row:
            return None
        margin = row["margin"]
        return "low" if margin <= low else "middle" if margin <= high else "high"

    return tercile


def lowest_accuracy(accuracies: Mapping[str, Mapping[str, Rate]], name: str) -> float | None:
    """The lowest accuracy of a slice with enough pairs, or the lowest `low` of their intervals."""
    large = [
        accuracy[name]
        for group in accuracies.values()
        for accuracy in group.values()
        if (accuracy["pairs"] or 0) >= MIN_SLICE_PAIRS
    ]
    return min((value for value in large if value is not None), default=None)


def mean_and_std(scores: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(scores), "std": pstdev(scores)}


def best_of_n(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """The expected value of the best by score of n of these N samples.

    This is the mean over all subsets of size n (Nakano et al. 2021): the sample of rank i (1 is the
    lowest score) is the best of C(i - 1, n - 1) of the C(N, n) subsets.
    """
    order = sorted(range(len(scores)), key=lambda index: scores[index])
    total = sum(math.comb(rank, n - 1) * values[index] for rank, index in enumerate(order))
    return total / math.comb(len(scores), n)


def disjoint_pairs(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Pairs that share no text; earlier pairs take precedence.

    Such pairs are independent, and no text is scored twice.
    """
    used: set[tuple[str, str]] = set()
    kept = []
    for row in pairs:
        texts = set(text_keys(row))
        if not used & texts:
            used |= texts
            kept.append(row)
    return kept


def text_keys(row: PreferencePair) -> tuple[tuple[str, str], tuple[str, str]]:
    """The two texts of a pair, each as (prompt, text)."""
    return (str(row["prompt"]), row["chosen"]), (str(row["prompt"]), row["rejected"])


@torch.no_grad()
def lineage_distance(reward_model: Any, sft: Any) -> float:
    """Distance of the reward model's weights from SFT's, relative to SFT's: |R - S| / |S|.

    All weights but the heads count, as one vector. Models that were pretrained apart have nearly
    orthogonal weights, so the distance is 1 or more. A weight of SFT that the reward model does not
    have, or has in another shape, counts as 0 there. Of an ensemble, the first member counts.
    """
    others = reward_model.base_model.state_dict()
    length, distance = 0.0, 0.0
    for name, weight in sft.base_model.state_dict().items():
        start = weight.float()
        other = others.get(name)
        same = other is not None and other.shape == start.shape
        difference = start - other.float() if same else start
        length += float(start.square().sum())
        distance += float(difference.square().sum())
    return math.sqrt(distance / length)
