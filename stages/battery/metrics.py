"""Numbers from scores. A pair's outcome is 1 where the chosen text scores higher, 0.5 for a tie,
else 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from stages.lib.core.files import metric_name
from stages.lib.core.types import Row
from stages.lib.metrics.stats import wilson_interval

ALIKE = 0.2  # lengths that differ by up to this share of the longer one are alike
LEAST_PAIRS = 30  # a slice of fewer says too little to be the worst one
Rate = dict[str, float | int | None]


def win(a: float, b: float) -> float:
    return 1.0 if a > b else 0.5 if a == b else 0.0


def rate(outcomes: Sequence[float], name: str, counted: str) -> Rate:
    """Mean outcome with Wilson's 95% interval (with ties, that of both roundings), and how many
    there are; null of nothing.
    """
    total, wins = len(outcomes), sum(outcomes)
    if not total:
        return {name: None, "low": None, "high": None, counted: 0}
    low, high = (
        wilson_interval(math.floor(wins), total)[0],
        wilson_interval(math.ceil(wins), total)[1],
    )
    return {name: wins / total, "low": low, "high": high, counted: total}


def highest(rates: Iterable[Rate], name: str = "rate") -> float | None:
    return max((value for each in rates if (value := each[name]) is not None), default=None)


def slices(pairs: Sequence[Row]) -> dict[str, dict[str, list[int]]]:
    """Places of pairs by {group: {slice: places}}, without empty slices: lengths in characters,
    sources, thirds of label margins.
    """
    margins = [row["margin"] for row in pairs if row.get("margin") is not None]
    groups: dict[str, Callable[[Row], str | None]] = {
        "length": lambda row: by_length(len(row["chosen"]), len(row["rejected"])),
        "source": lambda row: metric_name(row.get("source", "unknown")),
    }
    if margins:
        groups["margin"] = margin_tercile(margins)
    found: dict[str, dict[str, list[int]]] = {group: {} for group in groups}
    for place, row in enumerate(pairs):
        for group, name_of in groups.items():
            if name := name_of(row):
                found[group].setdefault(name, []).append(place)
    return found


def by_length(chosen: int, rejected: int) -> str:
    if abs(chosen - rejected) <= ALIKE * max(chosen, rejected):
        return "alike"
    return "chosen_shorter" if chosen < rejected else "chosen_longer"


def margin_tercile(margins: Sequence[float]) -> Callable[[Row], str | None]:
    """Which third of the margins a pair's is in; equal margins are in one third."""
    low, high = np.quantile(margins, [1 / 3, 2 / 3])

    def name(row: Row) -> str | None:
        margin = row.get("margin")
        return (
            None
            if margin is None
            else "low"
            if margin <= low
            else "middle"
            if margin <= high
            else "high"
        )

    return name


def worst_slice(accuracies: Mapping[str, Mapping[str, Rate]]) -> float | None:
    """The lowest accuracy of a slice with enough pairs."""
    large = [
        each
        for group in accuracies.values()
        for each in group.values()
        if (each["pairs"] or 0) >= LEAST_PAIRS
    ]
    return min((value for each in large if (value := each["accuracy"]) is not None), default=None)


def mean_and_std(scores: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(scores), "std": pstdev(scores)}


def best_of_n(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """The expected value of the best by score of n of these N samples: the mean over all subsets of
    size n (Nakano et al. 2021).

    The sample of rank i (1 the lowest score) is the best of C(i - 1, n - 1) of the C(N, n) subsets.
    """
    order = sorted(range(len(scores)), key=lambda place: scores[place])
    return sum(
        math.comb(rank, n - 1) * values[place] for rank, place in enumerate(order)
    ) / math.comb(len(scores), n)


def disjoint(pairs: Sequence[Row]) -> list[Row]:
    """Pairs that share no text, the first ones first: independent, and no text is scored twice."""
    used: set[tuple[str, str]] = set()
    kept = []
    for row in pairs:
        texts = set(text_keys(row))
        if not used & texts:
            used |= texts
            kept.append(row)
    return kept


def text_keys(row: Row) -> tuple[tuple[str, str], tuple[str, str]]:
    """A pair's two texts, as keys."""
    return (str(row["prompt"]), row["chosen"]), (str(row["prompt"]), row["rejected"])
