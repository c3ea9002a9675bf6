"""Each sign just inside and just outside of its thresholds, which are those of docs/ppo.md."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import (
    DANGER,
    HEALTH_CHECKS,
    WARN,
    MetricHistory,
    Monitor,
    worse_above,
    worse_below,
)
from tests.paths import ROOT

PARAMS = PpoParams(
    max_kl_per_token=0.5,
    min_kl_per_token=0.001,
    kl_patience=3,
    warmup_updates=4,
    response_length=100,
)
EPSILON = 1e-6
Columns = dict[str, list[float]]


def columns_of(first: float, middle: float, last: float) -> list[float]:
    """20 updates: 5, 10, and 5 with these values."""
    return [first] * 5 + [middle] * 10 + [last] * 5


def verdict(name: str, columns: Columns, params: PpoParams = PARAMS) -> str:
    [sign] = [sign for sign in HEALTH_CHECKS if sign.name == name]
    steps = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return sign.evaluate(MetricHistory(steps), params)[0]


@dataclass(frozen=True)
class Sign:
    """columns: for the value that the sign is about. warn, danger: its thresholds; documented:
    how docs/ppo.md writes them. below: values below them are bad.
    """

    columns: Callable[[float], Columns]
    warn: float
    danger: float
    documented: tuple[str, str]
    below: bool = False


# while the reward rises by a standard deviation
JUDGE_STAYS = {
    "reward_mean": columns_of(0.0, 0.0, 1.0),
    "reward_std": [1.0] * 20,
    "judge_score_mean": [0.3] * 20,
    "judge_score_std": [0.4] * 20,
}
SIGNS = {
    "entropy collapse": Sign(
        lambda x: {"entropy": columns_of(4.0, 4.0, 4.0 * x)}, 0.5, 0.35, ("50%", "35%"), below=True
    ),
    "one text for all prompts": Sign(
        lambda x: {"distinct_2": columns_of(0.8, 0.8, 0.8 * x)},
        0.75,
        0.6,
        ("75%", "60%"),
        below=True,
    ),
    "one ending for all prompts": Sign(
        lambda x: {"ending_share": columns_of(0.1, 0.1, 0.1 + x)}, 0.15, 0.25, ("0.15", "0.25")
    ),
    "reward and judge diverge": Sign(
        lambda x: {"score_judge_correlation": columns_of(0.3, 0.3, x), **JUDGE_STAYS},
        0.3,
        0.15,
        ("0.3", "0.15"),
        below=True,
    ),
    "judge prefers SFT": Sign(
        lambda x: {"reward_mean": columns_of(0.0, 0.0, 0.1), "validation_gain_z": [x] * 20},
        -2.0,
        -3.0,
        ("-2", "-3"),
        below=True,
    ),
    "length hack": Sign(
        lambda x: {
            "reward_mean": columns_of(0.0, 0.0, 0.1),
            "response_length": columns_of(50.0, 50.0, 50.0 * x),
        },
        1.3,
        1.6,
        ("1.3 times", "1.6 times"),
    ),
    "repetition": Sign(
        lambda x: {"repetition_3": columns_of(0.1, 0.1, 0.1 + x)}, 0.05, 0.1, ("0.05", "0.1")
    ),
    # the critic starts at loss 0; the median of the run is that of its middle
    "value loss explodes": Sign(
        lambda x: {"value_loss": columns_of(0.0, 0.2, 0.2 * x)}, 5.0, 20.0, ("5 times", "20 times")
    ),
    "clips too much": Sign(
        lambda x: {"clip_fraction": columns_of(0.0, 0.0, x)}, 0.35, 0.6, ("0.35", "0.6")
    ),
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_changes_its_verdict_at_its_thresholds(name: str) -> None:
    sign = SIGNS[name]
    worse = -EPSILON if sign.below else EPSILON
    verdicts = [
        verdict(name, sign.columns(value))
        for threshold in (sign.warn, sign.danger)
        for value in (threshold - worse, threshold + worse)
    ]
    assert verdicts == ["", WARN, WARN, DANGER]


@pytest.mark.parametrize("name", SIGNS)
def test_the_thresholds_are_documented(name: str) -> None:
    text = (ROOT / "docs/ppo.md").read_text()
    [row] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    for cell, number in zip(row.split("|")[2:4], SIGNS[name].documented, strict=True):
        assert re.search(rf"(?<![\d.-]){re.escape(number)}(?![\d.]*\d)", cell), (cell, number)


@pytest.mark.parametrize(("worse", "sign"), [(worse_above, 1), (worse_below, -1)])
def test_a_value_at_its_threshold_is_not_beyond_it(worse: Callable[..., Any], sign: int) -> None:
    values = [sign * value for value in (2.0, 2.5, 4.0, 4.5)]
    verdicts = [worse(value, sign * 2.0, sign * 4.0) for value in values]
    assert verdicts == list(zip(("", WARN, WARN, DANGER), values, strict=True))


def test_signs_with_a_danger_have_a_case_here() -> None:
    without_danger = {"reward does not move", "clips nothing"}
    of_kl = {"kl above budget", "no movement"}
    assert {sign.name for sign in HEALTH_CHECKS} == {*SIGNS, *without_danger, *of_kl}


def test_scorers_that_never_agreed_cannot_diverge() -> None:
    for first, expected in ((0.3, DANGER), (0.3 - EPSILON, "")):
        columns = {"score_judge_correlation": columns_of(first, first, 0.0), **JUDGE_STAYS}
        assert verdict("reward and judge diverge", columns) == expected


@pytest.mark.parametrize(
    ("reward", "judge", "expected"),
    [
        (1.0, 0.25 + EPSILON, ""),
        (1.0, 0.25 - EPSILON, DANGER),
        (1.0, -1.0, DANGER),
        (0.3 + EPSILON, 0.0, DANGER),
        (0.3 - EPSILON, 0.0, ""),
        (-1.0, -2.0, ""),
    ],
)
def test_scorers_that_rise_together_do_not_diverge(
    reward: float, judge: float, expected: str
) -> None:
    """Rises in standard deviations, which are 1.2 for rewards and 0.5 for judge scores."""
    columns = {
        "score_judge_correlation": columns_of(0.3, 0.3, 0.0),
        "reward_mean": columns_of(-1.0, -1.0, -1.0 + 1.2 * reward),
        "reward_std": [1.2] * 20,
        "judge_score_mean": columns_of(0.2, 0.2, 0.2 + 0.5 * judge),
        "judge_score_std": [0.5] * 20,
    }
    assert verdict("reward and judge diverge", columns) == expected


@pytest.mark.parametrize(
    ("longer", "expected"),
    [(10.0, ""), (10.1, WARN), (25.0, WARN), (25.1, DANGER)],
    ids=["a tenth", "more", "a quarter", "even more"],
)
def test_a_length_counts_by_its_share_of_the_response_length(longer: float, expected: str) -> None:
    """From 10 tokens: at least twice as long, of a response length of 100."""
    columns = {
        "reward_mean": columns_of(0.0, 0.0, 0.1),
        "response_length": columns_of(10.0, 10.0, 10.0 + longer),
    }
    assert verdict("length hack", columns) == expected


def kl_columns(early: float, last: list[float]) -> Columns:
    return {"kl_per_token": [early] * (20 - len(last)) + last}


@pytest.mark.parametrize(
    ("last", "expected"),
    [([0.6, 0.5 + EPSILON, 0.6], DANGER), ([0.6, 0.5, 0.6], ""), ([0.4, 0.6, 0.6], "")],
)
def test_kl_is_above_its_budget_in_each_of_the_last_updates(
    last: list[float], expected: str
) -> None:
    assert verdict("kl above budget", kl_columns(0.1, last)) == expected


@pytest.mark.parametrize(
    ("last", "expected"),
    [([0.0, 0.001 - EPSILON, 0.0], DANGER), ([0.0, 0.001, 0.0], ""), ([0.1, 0.0, 0.0], "")],
)
def test_a_policy_moves_if_one_of_the_last_updates_is_at_the_minimum(
    last: list[float], expected: str
) -> None:
    assert verdict("no movement", kl_columns(0.1, last)) == expected


def test_updates_of_the_warm_up_do_not_count_as_no_movement() -> None:
    """4 updates of warm-up and 3 of patience: the seventh is the first that can tell."""
    monitor = Monitor(PARAMS)
    steps = [{"step": number, "kl_per_token": 0.0} for number in range(1, 10)]
    new_findings = [monitor.check(steps[: number + 1]) for number in range(9)]
    assert [len(findings) for findings in new_findings] == [0] * 6 + [1, 0, 0]


def test_a_danger_is_no_warning_on_its_way_back() -> None:
    monitor = Monitor(PARAMS)
    steps = []
    for update in range(1, 41):
        steps.append({"step": update, "clip_fraction": 0.7 if update <= 20 else 0.5})
        monitor.check(steps)
    assert [(finding.update, finding.verdict) for finding in monitor.findings] == [(10, DANGER)]


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        (
            "reward does not move",
            {"reward_mean": columns_of(0, 0, 0.2), "reward_std": [2.0] * 20},
            "",
        ),
        (
            "reward does not move",
            {"reward_mean": columns_of(0, 0, 0.2 - EPSILON), "reward_std": [2.0] * 20},
            WARN,
        ),
        ("clips nothing", {"clip_fraction": [1e-4] * 20}, ""),
        ("clips nothing", {"clip_fraction": [1e-4 - EPSILON] * 20}, WARN),
    ],
)
def test_signs_that_are_warnings_at_most(name: str, columns: Columns, expected: str) -> None:
    assert verdict(name, columns) == expected


@pytest.mark.parametrize("name", ["judge prefers SFT", "length hack"])
def test_a_reward_that_stays_is_not_hacked(name: str) -> None:
    columns = {
        "reward_mean": [0.5] * 20,
        "validation_gain_z": [-9.0] * 20,
        "response_length": columns_of(10.0, 10.0, 90.0),
    }
    assert verdict(name, columns) == ""


@pytest.mark.parametrize(
    ("epochs", "mini_batch_size", "expected"), [(1, 64, ""), (2, 64, WARN), (1, 32, WARN)]
)
def test_only_several_steps_per_rollout_can_clip(
    epochs: int, mini_batch_size: int, expected: str
) -> None:
    params = PpoParams(batch_size=64, mini_batch_size=mini_batch_size, num_ppo_epochs=epochs)
    assert verdict("clips nothing", {"clip_fraction": [0.0] * 20}, params) == expected
