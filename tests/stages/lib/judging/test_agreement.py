"""Agreement by hand: Cohen's kappa from its table, Wilson's interval from its formula."""

from math import sqrt

import pytest

from stages.lib.judging.jury import between_orders, human_agreement
from stages.lib.judging.pairwise import Preference, TwoOrderVerdict, Verdict

A, B, TIE = (Verdict(preference) for preference in (Preference.a, Preference.b, Preference.tie))


def test_between_orders():
    """First order A A A B B tie, second A A B B A tie: 4 of 6 equal; by chance 3/6 3/6 + 2/6 2/6 +
    1/6 1/6 = 14/36.
    """
    orders = [(A, A), (A, A), (A, B), (B, B), (B, A), (TIE, TIE)]
    result = between_orders(
        [
            *(TwoOrderVerdict(*order) for order in orders),
            TwoOrderVerdict(A, None),
            TwoOrderVerdict(None, None),
        ]
    )
    assert result["position_consistency"] == pytest.approx(4 / 6)
    assert result["kappa"] == pytest.approx((4 / 6 - 14 / 36) / (1 - 14 / 36))


def test_a_judge_that_always_answers_a_never_agrees_with_itself():
    # the second verdict is converted back to the first order
    result = between_orders([TwoOrderVerdict(A, B)] * 5)
    assert result == {"position_consistency": 0.0, "kappa": 0.0}


def test_kappa_is_undefined_if_all_answers_are_the_same():
    assert between_orders([TwoOrderVerdict(TIE, TIE)] * 3) == {
        "position_consistency": 1.0,
        "kappa": None,
    }
    assert between_orders([TwoOrderVerdict(A, None)]) == {
        "position_consistency": None,
        "kappa": None,
    }


def test_agreement_with_people():
    """People chose A: correct in 3 of 4 decided comparisons; the others are a tie, a preference
    that changes with the order, and an unreadable answer.
    """
    result = human_agreement(
        [
            *[TwoOrderVerdict(A, A)] * 3,
            TwoOrderVerdict(B, B),
            TwoOrderVerdict(TIE, TIE),
            TwoOrderVerdict(A, B),
            TwoOrderVerdict(None, A),
        ]
    )
    z, n, p = 1.96, 4, 0.75
    centre, half = (
        (p + z**2 / 8) / (1 + z**2 / n),
        z * sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n),
    )
    assert result == {
        "rate": 0.75,
        "low": pytest.approx(centre - half, abs=1e-4),
        "high": pytest.approx(centre + half, abs=1e-4),
        "pairs": 4,
        "ties": 2,
        "unparsable": 1,
    }
    assert human_agreement([TwoOrderVerdict(TIE, TIE)]) == {
        "rate": None,
        "low": None,
        "high": None,
        "pairs": 0,
        "ties": 1,
        "unparsable": 0,
    }
