"""Metrics of rollout rows."""

import pytest

from stages.lib.core.rows import RolloutRow
from stages.ppo.common.outputs import describe_texts


def rows(*judged: tuple[float, float]) -> list[RolloutRow]:
    """Rows with these scores of reward model and judge."""
    return [
        {
            "update": 1,
            "id": str(number),
            "prompt": "It",
            "response": f" was {number} and over.",
            "score": score,
            "judge_score": judge_score,
            "reward": score,
            "kl": 0.0,
            "finish_reason": "stop",
            "length": 5,
        }
        for number, (score, judge_score) in enumerate(judged)
    ]


def test_judge_scores_have_mean_deviation_and_correlation_with_the_scores():
    """Deviations of (1, 2, 3) and (0.2, 0.8, 0.5): covariance 0.1, variances 2/3 and 0.06."""
    metrics = describe_texts(rows((1.0, 0.2), (2.0, 0.8), (3.0, 0.5)))
    assert metrics["judge_score_mean"] == pytest.approx(0.5)
    assert metrics["judge_score_std"] == pytest.approx(0.06**0.5)
    assert metrics["score_judge_correlation"] == pytest.approx(0.1 / (2 / 3 * 0.06) ** 0.5)


def test_without_a_judge_that_scores_there_are_no_judge_scores():
    plain = rows((1.0, 0.2), (2.0, 0.8))
    for row in plain:
        del row["judge_score"]
    assert not [name for name in describe_texts(plain) if "judge" in name]
