"""Agreement of a judge with itself in the other order, with another judge, and with people."""

from collections.abc import Sequence
from typing import Any

from sklearn.metrics import cohen_kappa_score

from stages.lib.judging.pairwise import Preference, TwoOrderVerdict
from stages.lib.metrics.stats import wilson_interval


def agreement(answers: Sequence[tuple[str, str]]) -> tuple[float, float | None]:
    """Agreement of two raters.

    Args:
        answers: the two raters' answers per item.

    Returns:
        The share of equal answers, and Cohen's kappa (1960), which corrects for chance; kappa is
        None if all answers are the same.
    """
    first, second = zip(*answers, strict=True)
    kappa = float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else None
    return sum(one == other for one, other in answers) / len(answers), kappa


def between_orders(judgements: Sequence[TwoOrderVerdict]) -> dict[str, float | None]:
    """Agreement of a judge with itself when A and B change places.

    Returns:
        position_consistency: share of comparisons with the same preference in both orders; kappa:
        the same, corrected for chance. Only comparisons with two readable answers count; both are
        None if there are none.
    """
    orders = [
        (verdicts.first.preference.value, verdicts.second.preference.value)
        for verdicts in judgements
        if verdicts.first and verdicts.second
    ]
    if not orders:
        return {"position_consistency": None, "kappa": None}
    consistency, kappa = agreement(orders)
    return {"position_consistency": consistency, "kappa": kappa}


def between_judges(
    first_judge: Sequence[TwoOrderVerdict], second_judge: Sequence[TwoOrderVerdict]
) -> dict[str, float | None]:
    """Agreement of two judges on the same comparisons.

    Returns:
        agreement: share of comparisons with the same preference, ties included; kappa: the same,
        corrected for chance. Both are None without comparisons.
    """
    pairs = [
        (first.preference.value, second.preference.value)
        for first, second in zip(first_judge, second_judge, strict=True)
    ]
    share, kappa = agreement(pairs) if pairs else (None, None)
    return {"agreement": share, "kappa": kappa}


def human_agreement(judgements: Sequence[TwoOrderVerdict]) -> dict[str, Any]:
    """Agreement of a judge with people, on comparisons whose response A people chose.

    Returns:
        rate: share of the decided comparisons in which the judge prefers A, with its 95% interval
        low, high; pairs: number of decided comparisons; ties; unparsable: comparisons without two
        readable answers. rate, low and high are None if no comparison was decided.
    """
    decided = [
        verdicts.preference for verdicts in judgements if verdicts.preference is not Preference.tie
    ]
    correct = sum(preference is Preference.a for preference in decided)
    low, high = wilson_interval(correct, len(decided)) if decided else (None, None)
    unparsable = sum(not verdicts.readable for verdicts in judgements)
    return {
        "rate": correct / len(decided) if decided else None,
        "low": low,
        "high": high,
        "pairs": len(decided),
        "ties": len(judgements) - len(decided) - unparsable,
        "unparsable": unparsable,
    }
