"""How far a judge agrees with itself when responses change places, and with people."""

from collections.abc import Sequence
from typing import Any

from sklearn.metrics import cohen_kappa_score

from stages.preferences import Judgement, Preference
from stages.statistics import wilson_interval


def between_orders(judgements: Sequence[Judgement]) -> dict[str, float | None]:
    """position_consistency: share of comparisons of which both orders say the same. kappa: Cohen's (1960), the same beyond chance.

    Over the comparisons of which both answers were readable; None where there is none, and kappa also where all answers are the same.
    """
    orders = [(each.first.preference.value, each.second.preference.value) for each in judgements if each.first and each.second]
    if not orders:
        return {"position_consistency": None, "kappa": None}
    first, second = zip(*orders, strict=True)
    same = sum(one == other for one, other in orders) / len(orders)
    kappa = float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else None
    return {"position_consistency": same, "kappa": kappa}


def with_people(judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Of comparisons whose A people chose: the judge's rate of the same among those it tells apart (`pairs`), with its 95% interval."""
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
