"""How far a judge agrees with itself when responses change places, with another one, and with
people.
"""

from collections.abc import Sequence
from typing import Any

from sklearn.metrics import cohen_kappa_score

from stages.lib.judging.pairwise import Preference, TwoOrderVerdict
from stages.lib.metrics.stats import wilson_interval


def between_orders(judgements: Sequence[TwoOrderVerdict]) -> dict[str, float | None]:
    """position_consistency: share of comparisons of which both orders say the same. kappa: Cohen's
    (1960), the same beyond chance.

    Over the comparisons of which both answers were readable; None where there is none, and kappa
    also where all answers are the same.
    """
    orders = [
        (each.first.preference.value, each.second.preference.value)
        for each in judgements
        if each.first and each.second
    ]
    if not orders:
        return {"position_consistency": None, "kappa": None}
    same, beyond_chance = agreement(orders)
    return {"position_consistency": same, "kappa": beyond_chance}


def between_judges(
    ours: Sequence[TwoOrderVerdict], theirs: Sequence[TwoOrderVerdict]
) -> dict[str, float | None]:
    """agreement: share of comparisons on which two judges prefer the same, ties too; kappa: beyond
    chance. None without any comparison.
    """
    both = [(a.preference.value, b.preference.value) for a, b in zip(ours, theirs, strict=True)]
    same, beyond_chance = agreement(both) if both else (None, None)
    return {"agreement": same, "kappa": beyond_chance}


def agreement(answers: Sequence[tuple[str, str]]) -> tuple[float, float | None]:
    """The share of equal answers, and Cohen's kappa; None where all answers are the same one."""
    first, second = zip(*answers, strict=True)
    kappa = float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else None
    return sum(one == other for one, other in answers) / len(answers), kappa


def human_agreement(judgements: Sequence[TwoOrderVerdict]) -> dict[str, Any]:
    """Of comparisons whose A people chose: the judge's rate of the same among those it tells apart
    (`pairs`), with its 95% interval.
    """
    told = [each.preference for each in judgements if each.preference is not Preference.tie]
    right = sum(preference is Preference.a for preference in told)
    low, high = wilson_interval(right, len(told)) if told else (None, None)
    unparsable = sum(not each.readable for each in judgements)
    return {
        "rate": right / len(told) if told else None,
        "low": low,
        "high": high,
        "pairs": len(told),
        "ties": len(judgements) - len(told) - unparsable,
        "unparsable": unparsable,
    }
