"""Each sign of the health monitor on a synthetic run with just that problem, on a healthy run, and
just inside and just outside of its thresholds, which are those of docs/ppo.md.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import (
    DANGER,
    HEALTH_CHECKS,
    KL_ABOVE_BUDGET,
    WARN,
    MetricHistory,
    Monitor,
    worse_above,
    worse_below,
)
from tests.paths import ROOT

PARAMS = PpoParams(max_kl_per_token=0.5, min_kl_per_token=0.001, kl_patience=5, warmup_updates=2)
UPDATES = 20


def healthy(update: int) -> dict[str, float]:
    """The score rises, KL rises to 0.4, all else drifts a little, as in the default run."""
    share = update / UPDATES
    return {
        "step": update,
        "reward_mean": -1.5 + 2.0 * share,
        "reward_std": 1.2,
        "kl_per_token": 0.4 * share,
        "entropy": 4.8 - 1.2 * share,
        "distinct_2": 0.97 - 0.05 * share,
        "ending_share": 0.06 + 0.06 * share,
        "score_judge_correlation": 0.5 - 0.05 * share,
        "judge_score_mean": 0.3 + 0.4 * share,
        "judge_score_std": 0.4,
        "response_length": 17.0 - 4.0 * share,
        "repetition_3": 0.01,
        "value_loss": 0.5,
        "explained_variance": 0.3,
        "clip_fraction": 0.08,
        "validation_gain_z": 2.0 * share,
    }


def monitor_run(change=lambda share: {}, params: PpoParams = PARAMS) -> Monitor:
    """A monitor after a healthy run with changed metrics, by the share of the run that is done."""
    monitor = Monitor(params)
    steps = []
    for update in range(1, UPDATES + 1):
        steps.append(healthy(update) | change(update / UPDATES))
        monitor.check(steps)
    return monitor


def test_a_healthy_run_has_no_findings():
    monitor = monitor_run()
    assert monitor.findings == [] and monitor.verdict == "healthy"


# by the sign that reports it: the changed metrics, and the worst verdict
PROBLEMS = {
    "kl above budget": (lambda share: {"kl_per_token": 0.8 * share}, DANGER),
    "no movement": (lambda share: {"kl_per_token": 0.0005}, DANGER),
    "reward does not move": (lambda share: {"reward_mean": -1.5}, WARN),
    "entropy collapse": (lambda share: {"entropy": 4.8 - 4.0 * share}, DANGER),
    "one text for all prompts": (lambda share: {"distinct_2": 0.97 - 0.6 * share}, DANGER),
    "one ending for all prompts": (lambda share: {"ending_share": 0.06 + 0.6 * share}, DANGER),
    "reward and judge diverge": (
        lambda share: {
            "score_judge_correlation": 0.5 - 0.45 * share,
            "judge_score_mean": 0.3,
        },
        DANGER,
    ),
    "judge prefers SFT": (lambda share: {"validation_gain_z": -4.0 * share}, DANGER),
    "length hack": (lambda share: {"response_length": 12 + 12 * share}, DANGER),
    "repetition": (lambda share: {"repetition_3": 0.01 + 0.3 * share}, DANGER),
    "value loss explodes": (lambda share: {"value_loss": 0.5 if share < 0.8 else 50.0}, DANGER),
    "critic predicts nothing": (lambda share: {"explained_variance": -0.1}, DANGER),
    "clips too much": (lambda share: {"clip_fraction": 0.8}, DANGER),
    "clips nothing": (lambda share: {"clip_fraction": 0.0}, WARN),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_is_reported_and_no_other(name):
    change, worst_verdict = PROBLEMS[name]
    monitor = monitor_run(change)
    assert {finding.sign for finding in monitor.findings} == {name}
    assert monitor.verdict == worst_verdict


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_settings_mean_the_same_at_24_and_at_512_tokens(name):
    """Lengths, and KL per sequence, are in proportion to `response_length`."""

    def findings(tokens):
        def change(share):
            row = healthy(share * UPDATES) | PROBLEMS[name][0](share)
            length = row["response_length"] * tokens / 24
            return row | {"response_length": length, "kl": row["kl_per_token"] * length}

        params = PARAMS.model_copy(update={"response_length": tokens})
        return [(f.sign, f.verdict, f.update) for f in monitor_run(change, params).findings]

    assert findings(24) == findings(512) != []


def test_every_sign_has_a_problem():
    assert {sign.name for sign in HEALTH_CHECKS} == set(PROBLEMS)


def test_a_sign_is_reported_as_a_warning_then_as_a_danger_and_not_again():
    findings = monitor_run(PROBLEMS["entropy collapse"][0]).findings
    assert [finding.verdict for finding in findings] == [WARN, DANGER]
    assert findings[0].update < findings[1].update
    # entropy 4.8 - 0.2 per update: the mean of the first 5 is 4.2, and that of the last 5 is below
    # half of it from update 16 on (4.8 - 0.2 * 14 = 2.0)
    assert findings[0].update == 16 and findings[0].value == pytest.approx(2.0 / 4.2)


def test_dangers_are_counted_up_to_an_update_and_warnings_are_not():
    monitor = monitor_run(lambda share: {"entropy": 4.8 - 4.0 * share, "clip_fraction": 0.8})
    # the clip fraction is above 0.6 as soon as it can be read, at 10. Entropy falls by 0.2 per
    # update, its first mean is 4.2, its last one 4.8 - 0.2 * (n - 2): a warning below 2.1 (n = 16),
    # a danger below 1.47 (n = 19)
    assert [monitor.dangers(update) for update in (9, 10, 18, 19)] == [0, 1, 1, 2]


def test_a_kl_above_the_budget_is_no_danger_of_the_selected_policy():
    monitor = monitor_run(lambda share: {"kl_per_token": 9.0})
    assert [finding.sign for finding in monitor.findings] == [KL_ABOVE_BUDGET]
    assert monitor.dangers(UPDATES) == 0


def test_signs_of_missing_metrics_are_left_out_and_the_fix_names_the_kl_key():
    monitor = Monitor(PpoParams(max_kl_per_token=1.0, kl_patience=2), kl_key="rloo.beta")
    steps = [{"step": step, "kl_per_token": 2.0} for step in range(1, 21)]
    assert [(finding.sign, finding.first_fix) for finding in monitor.check(steps)] == [
        ("kl above budget", "raise rloo.beta, lower ppo.learning_rate")
    ]
    assert monitor.report()["verdict"] == "danger"


def test_a_resumed_run_has_the_findings_of_the_steps_before() -> None:
    """Each at its own update: clips too much from the tenth, the earliest, and from the 20th."""
    steps = [
        healthy(update) | {"clip_fraction": 0.5, "repetition_3": 0.01 if update < 20 else 1.0}
        for update in range(1, 21)
    ]
    monitor, resumed = Monitor(PARAMS), Monitor(PARAMS)
    for number in range(1, len(steps) + 1):
        monitor.check(steps[:number])
    resumed.check_history(steps)
    assert resumed.findings == monitor.findings
    assert [(finding.sign, finding.update) for finding in resumed.findings] == [
        ("clips too much", 10),
        ("repetition", 20),
    ]


def test_a_finding_has_what_its_sign_says() -> None:
    """As health.json has it."""
    monitor = monitor_run(lambda share: {"repetition_3": 0.01 if share < 1 else 0.5})
    [sign] = [sign for sign in HEALTH_CHECKS if sign.name == "repetition"]
    report = monitor.report()
    assert report.keys() == {"verdict", "findings"} and report["verdict"] == monitor.verdict
    [finding] = report["findings"]
    assert finding["update"] == UPDATES
    names = ("metric", "threshold", "cause")
    assert [finding[name] for name in names] == [getattr(sign, name) for name in names]


# of responses of at most 100 tokens
LONG = PpoParams(
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


def verdict_of(name: str, columns: Columns, params: PpoParams = LONG) -> str:
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
        verdict_of(name, sign.columns(value))
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


def test_scorers_that_never_agreed_cannot_diverge() -> None:
    for first, expected in ((0.3, DANGER), (0.3 - EPSILON, "")):
        columns = {"score_judge_correlation": columns_of(first, first, 0.0), **JUDGE_STAYS}
        assert verdict_of("reward and judge diverge", columns) == expected


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
    assert verdict_of("reward and judge diverge", columns) == expected


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
    assert verdict_of("length hack", columns) == expected


def kl_columns(early: float, last: list[float]) -> Columns:
    return {"kl_per_token": [early] * (20 - len(last)) + last}


@pytest.mark.parametrize(
    ("last", "expected"),
    [([0.6, 0.5 + EPSILON, 0.6], DANGER), ([0.6, 0.5, 0.6], ""), ([0.4, 0.6, 0.6], "")],
)
def test_kl_is_above_its_budget_in_each_of_the_last_updates(
    last: list[float], expected: str
) -> None:
    assert verdict_of("kl above budget", kl_columns(0.1, last)) == expected


@pytest.mark.parametrize(
    ("last", "expected"),
    [([0.0, 0.001 - EPSILON, 0.0], DANGER), ([0.0, 0.001, 0.0], ""), ([0.1, 0.0, 0.0], "")],
)
def test_a_policy_moves_if_one_of_the_last_updates_is_at_the_minimum(
    last: list[float], expected: str
) -> None:
    assert verdict_of("no movement", kl_columns(0.1, last)) == expected


def test_updates_of_the_warm_up_do_not_count_as_no_movement() -> None:
    """4 updates of warm-up and 3 of patience: the seventh is the first that can tell."""
    monitor = Monitor(LONG)
    steps = [{"step": number, "kl_per_token": 0.0} for number in range(1, 10)]
    new_findings = [monitor.check(steps[: number + 1]) for number in range(9)]
    assert [len(findings) for findings in new_findings] == [0] * 6 + [1, 0, 0]


def test_a_danger_is_no_warning_on_its_way_back() -> None:
    monitor = Monitor(LONG)
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
    assert verdict_of(name, columns) == expected


@pytest.mark.parametrize("name", ["judge prefers SFT", "length hack"])
def test_a_reward_that_stays_is_not_hacked(name: str) -> None:
    columns = {
        "reward_mean": [0.5] * 20,
        "validation_gain_z": [-9.0] * 20,
        "response_length": columns_of(10.0, 10.0, 90.0),
    }
    assert verdict_of(name, columns) == ""


@pytest.mark.parametrize(
    ("epochs", "mini_batch_size", "expected"), [(1, 64, ""), (2, 64, WARN), (1, 32, WARN)]
)
def test_only_several_steps_per_rollout_can_clip(
    epochs: int, mini_batch_size: int, expected: str
) -> None:
    params = PpoParams(batch_size=64, mini_batch_size=mini_batch_size, num_ppo_epochs=epochs)
    assert verdict_of("clips nothing", {"clip_fraction": [0.0] * 20}, params) == expected


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-0.1] * 10, DANGER),
        ([-0.1] * 3 + [0.1] + [-0.1] * 6, WARN),  # not all of the last ten
        ([-0.1] * 5 + [0.0] * 5, ""),
        ([-0.1] * 2 + [math.nan] + [-0.1] * 7, WARN),  # all returns were equal once
    ],
)
def test_a_critic_that_predicts_nothing_is_a_danger_after_ten_updates(values, verdict):
    [sign] = [sign for sign in HEALTH_CHECKS if sign.name == "critic predicts nothing"]
    history = MetricHistory([{"explained_variance": value} for value in values])
    assert sign.evaluate(history, PARAMS)[0] == verdict and sign.min_updates == 10
