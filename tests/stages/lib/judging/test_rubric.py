"""Answers of language models in the forms that occur."""

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params import check_params
from stages.lib.judging.endpoint import answer_format, majority_preference, parse_verdict
from stages.lib.judging.pairwise import Preference, Verdict

A, B, TIE = Preference.a, Preference.b, Preference.tie
TWO = {"kind": "Kinder.", "true": "Truer."}
SAY_A, SAY_B = (f'{{"reason": "so", "preference": "{it}"}}' for it in "AB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(SAY_A, A), (f"<think>{{A}} or {{B}}?</think>\n{SAY_B} ", B), ('{"preference":"tie"}', TIE)],
)
def test_one_preference(text, expected):
    assert parse_verdict(text, "Be fair.") == Verdict(expected)


def test_one_preference_per_dimension():
    assert parse_verdict('{"reason": "so", "kind": "B", "true": "tie"}', TWO) == Verdict(
        B, None, {"kind": B, "true": TIE}
    )
    assert (
        answer_format(TWO)
        == '{"reason": "one sentence", "kind": "A" or "B" or "tie", "true": "A" or "B" or "tie"}'
    )


@pytest.mark.parametrize("text", ["", "A", "{}", '{"preference": "C"}', "{preference: A}"])
def test_unreadable_answers(text):
    with pytest.raises(ValueError):
        parse_verdict(text, "Be fair.")


def test_a_missing_dimension_is_named():
    with pytest.raises(ValueError, match="true: expected A, B or tie, and it says None"):
        parse_verdict('{"kind": "A"}', TWO)


@pytest.mark.parametrize(
    ("preferences", "expected"), [([A, A, B], A), ([A, B], TIE), ([TIE, B, TIE], B), ([TIE], TIE)]
)
def test_the_majority_of_dimensions_decides(preferences, expected):
    assert majority_preference(dict(enumerate(preferences))) is expected


@pytest.mark.parametrize("name", ["Kind", "very kind", "", "reason"])
def test_a_dimension_needs_a_valid_metric_name(name):
    with pytest.raises(BadInput, match=r"annotate\.endpoint\.rubric"):
        check_params({"annotate": {"endpoint": {"rubric": {name: "x"}}}}, "test")


def test_no_dimension_at_all_is_refused():
    with pytest.raises(BadInput, match="one dimension at least"):
        check_params({"annotate": {"endpoint": {"rubric": {}}}}, "test")
