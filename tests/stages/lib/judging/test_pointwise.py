"""Judges that score each response alone."""

import pytest

from stages.lib.core.errors import RondoError
from stages.lib.judging.pairwise import Comparison, Preference
from stages.lib.judging.pointwise import PointwiseJudge


def test_the_higher_score_wins_by_more_than_the_margin_and_is_computed_once():
    scored = []

    def score(prompts, responses):
        scored.extend(zip(prompts, responses, strict=True))
        return [float(response) for response in responses]

    judge = PointwiseJudge("number", score, 0.5)
    questions = [
        Comparison("p", a, b) for a, b in (("2", "1"), ("1", "2"), ("1.5", "1"), ("1.6", "1"))
    ]
    preferences = [verdict.preference for verdict in judge.compare(questions)]
    assert preferences == [Preference.a, Preference.b, Preference.tie, Preference.a]
    judge.compare([Comparison("p", "1", "2"), Comparison("q", "1", "2")])
    assert sorted(scored) == [
        ("p", "1"),
        ("p", "1.5"),
        ("p", "1.6"),
        ("p", "2"),
        ("q", "1"),
        ("q", "2"),
    ]
    assert (judge.describe(), judge.cost(), judge.usage()) == ({"judge": "number"}, {}, {})


@pytest.mark.parametrize("numbers", [[1.0], [1.0, float("nan")], [1.0, "2"]])
def test_a_judge_with_invalid_scores_is_named(numbers):
    judge = PointwiseJudge("mine:polite", lambda prompts, responses: numbers, 0.0)
    with pytest.raises(
        RondoError, match="judge mine:polite: one finite number for each of 2 responses expected"
    ):
        judge.compare([Comparison("p", "a", "b")])
