"""Judges that need no server."""

import pytest

from stages.lib.core.errors import RondoError
from stages.lib.judging.pairwise import Comparison, Preference
from stages.lib.judging.pointwise import PointwiseJudge


def test_the_higher_number_wins_by_more_than_the_margin_and_is_asked_for_once():
    asked = []

    def number(prompts, responses):
        asked.extend(zip(prompts, responses, strict=True))
        return [float(response) for response in responses]

    judge = PointwiseJudge("number", number, 0.5)
    questions = [
        Comparison("p", a, b) for a, b in (("2", "1"), ("1", "2"), ("1.5", "1"), ("1.6", "1"))
    ]
    told = [verdict.preference for verdict in judge.compare(questions)]
    assert told == [Preference.a, Preference.b, Preference.tie, Preference.a]
    judge.compare([Comparison("p", "1", "2"), Comparison("q", "1", "2")])
    assert sorted(asked) == [
        ("p", "1"),
        ("p", "1.5"),
        ("p", "1.6"),
        ("p", "2"),
        ("q", "1"),
        ("q", "2"),
    ]
    assert (judge.describe(), judge.cost(), judge.usage()) == ({"judge": "number"}, {}, {})


@pytest.mark.parametrize("numbers", [[1.0], [1.0, float("nan")], [1.0, "2"]])
def test_a_judge_that_does_not_answer_is_named(numbers):
    judge = PointwiseJudge("mine:polite", lambda prompts, responses: numbers, 0.0)
    with pytest.raises(
        RondoError, match="judge mine:polite: one finite number for each of 2 responses wanted"
    ):
        judge.compare([Comparison("p", "a", "b")])
