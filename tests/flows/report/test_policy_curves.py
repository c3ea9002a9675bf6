"""Charts of PPO's training: a drawn threshold is where the health check itself fires."""

import math
from pathlib import Path

import pytest

from flows.report import policy_curves
from flows.report.charts import Chart
from flows.report.line_charts import FINDING, SELECTED, Bound
from flows.report.round_data import RoundResults, read_round
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params import load_params
from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import HEALTH_CHECKS, WINDOW, HealthCheck, MetricHistory
from tests.flows.report.reading import all_ran

PPO = PpoParams()
EPSILON = 0.001
# Healthy values of a run; a test changes those of its last updates
START = {
    "kl": 3.0,
    "kl_per_token": 0.25,
    "reward_mean": -1.5,
    "reward_std": 0.8,
    "entropy": 4.0,
    "distinct_2": 0.9,
    "ending_share": 0.2,
    "repetition_3": 0.02,
}
START |= {
    "score_judge_correlation": 0.6,
    "judge_score_mean": 0.3,
    "judge_score_std": 0.4,
    "validation_gain_z": 1.0,
    "response_length": 12.0,
    "value_loss": 0.5,
    "explained_variance": 0.3,
    "clip_fraction": 0.1,
}
DRAWN = [column for _, columns, _ in policy_curves.PANELS for column in columns.values()]


def run(column: str, value: float) -> dict[str, list[float]]:
    """Columns of 20 updates; in the last ones `column` is `value`, and the reward rises, without
    which the checks of length and of the judge do not fire.
    """
    updates = 3 * WINDOW
    ends = START | {"reward_mean": 1.0} | {column: value}
    columns = {name: [start] * updates + [ends[name]] * WINDOW for name, start in START.items()}
    return {"step": [float(n + 1) for n in range(updates + WINDOW)], **columns}


def fires(check: HealthCheck, columns: dict[str, list[float]]) -> bool:
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return bool(check.evaluate(MetricHistory(rows), PPO)[0])


@pytest.mark.parametrize("check", HEALTH_CHECKS, ids=lambda check: check.name)
def test_every_check_has_a_curve_and_fires_on_one_side_of_its_bound_only(
    check: HealthCheck,
) -> None:
    assert check.column in DRAWN
    bound = policy_curves.bound(check, run(check.column, START[check.column]), PPO)
    assert bound is not None
    below, above = (
        fires(check, run(check.column, bound + offset)) for offset in (-EPSILON, EPSILON)
    )
    assert below != above
    upwards = "more" in check.threshold or "above" in check.threshold
    assert (below, above) == ((True, False) if upwards else (False, True))


def test_bounds_by_hand() -> None:
    columns, checks = run("kl", 3.0), {check.name: check for check in HEALTH_CHECKS}
    bounds = {name: policy_curves.bound(check, columns, PPO) for name, check in checks.items()}
    assert (
        bounds["kl above budget"] == PPO.max_kl_per_token
        and bounds["no movement"] == PPO.min_kl_per_token
    )
    assert bounds["entropy collapse"] == pytest.approx(2.0)  # half of 4
    assert bounds["length hack"] == pytest.approx(15.6)  # 1.3 times 12
    assert bounds["one ending for all prompts"] == pytest.approx(0.35)  # 0.15 more than 0.2
    assert bounds["reward does not move"] == pytest.approx(-1.42)  # a tenth of 0.8 more than -1.5
    assert bounds["value loss explodes"] == pytest.approx(2.5)  # five times 0.5
    # the mean of the first 5 updates is the start: 5; a relative bound needs 10 updates
    climbing = {
        "step": [float(n) for n in range(1, 11)],
        "entropy": [4.0, 4.5, 5.0, 5.5, 6.0, *[1.0] * 5],
    }
    collapse, nine_updates = checks["entropy collapse"], {k: v[:9] for k, v in climbing.items()}
    assert policy_curves.bound(collapse, climbing, PPO) == pytest.approx(2.5)
    assert policy_curves.bound(collapse, nine_updates, PPO) is None
    assert policy_curves.bound(checks["kl above budget"], {}, PPO) == PPO.max_kl_per_token


def results(name: str = "r0", selected: int = 8, entropy: float = 4.0) -> RoundResults:
    """A run with a length hack in its last updates."""
    explained = {"threshold": "1.3 or less", "cause": "<script>", "first_fix": "none"}
    length = explained | {"sign": "length hack", "metric": "response_length, last / first"}
    findings = [
        length | {"verdict": "warn", "update": 12, "value": 1.4},
        length | {"verdict": "danger", "update": 99, "value": 1.7},  # no curve has it
        explained
        | {"sign": "nothing gained", "verdict": "warn", "update": 0, "metric": "policy_update"},
    ]
    write_json(stage_dir(name, "ppo") / "health.json", {"findings": findings})
    write_json(stage_dir(name, "ppo") / "metrics.json", {"policy_update": selected})
    columns = run("response_length", 24.0) | {"validation_kl": [math.nan] * 19 + [3.5]}
    columns["entropy"] = [entropy] * 20
    rows = (
        ",".join("" if math.isnan(value) else str(value) for value in row)
        for row in zip(*columns.values(), strict=True)
    )
    write_text(stage_dir(name, "ppo") / "curves.csv", "\n".join([",".join(columns), *rows, ""]))
    return read_round(name, all_ran(name))


def charts_by_title(*rounds: RoundResults) -> dict[str, Chart]:
    drawn = policy_curves.pictures([(round_, load_params()) for round_ in rounds])
    return {chart.title: chart for chart in drawn}


def test_findings_and_the_selected_update_are_marked_on_their_curves(project: Path) -> None:
    selected, finding = policy_curves.round_marks(results(), ("response_length",), "tokens")
    assert (selected.kind, selected.x, selected.y) == (SELECTED, 8, 12.0)
    assert selected.texts == {"selected policy": "update 8", "value": "12 tokens"}
    assert (finding.kind, finding.x, finding.y) == (FINDING, 12, 12.0)
    assert finding.texts == {
        "finding": "warn: length hack, update 12",
        "value": "response_length, last / first 1.4",
        "healthy": "1.3 or less",
        "cause": "<script>",
        "first": "none",
    }
    kinds = [mark.kind for mark in policy_curves.round_marks(results(), ("entropy",), "nats")]
    assert kinds == [SELECTED]


def test_update_0_and_a_policy_of_no_update_are_on_no_curve(project: Path) -> None:
    assert policy_curves.round_marks(results(selected=0), ("entropy",), "nats") == []
    write_json(stage_dir("r0", "ppo") / "metrics.json", {})
    without = read_round("r0", all_ran("r0"))
    assert policy_curves.round_marks(without, ("entropy",), "nats") == []


def test_all_rounds_are_in_each_chart_of_what_was_measured(project: Path) -> None:
    drawn = charts_by_title(results("r0"), results("r1", entropy=2.0))
    columns = {*START, "validation_kl"}
    assert list(drawn) == [
        title for title, panel, _ in policy_curves.PANELS if columns & {*panel.values()}
    ]
    assert [
        (row["round"], row["series"], row["y"][-1])
        for row in drawn["KL from SFT per sequence"].spec["data"]["values"]
    ] == [
        ("r0", "training", 3),
        ("r0", "validation", 3.5),
        ("r1", "training", 3),
        ("r1", "validation", 3.5),
    ]
    # each round has the threshold that follows from its own start
    assert policy_curves.round_bounds(results("r1", entropy=2.0), ["entropy"], PPO) == [
        Bound("r1", "entropy collapse:", pytest.approx(1.0))
    ]


def test_a_threshold_is_explained_in_words(project: Path) -> None:
    drawn = charts_by_title(results())
    [kl, still] = policy_curves.round_bounds(results(), ["kl_per_token"], PPO)
    assert kl.text == "kl above budget (ppo.max_kl_per_token):" and kl.value == PPO.max_kl_per_token
    assert still.text == "no movement (ppo.min_kl_per_token):"
    assert drawn["Entropy"].note.startswith(
        "entropy collapse: healthy is last / first 0.5 or more."
    )
    assert "Dots: validation prompts." in drawn["KL from SFT per sequence"].note


def test_an_infinite_value_is_left_out() -> None:
    columns = {"step": [1.0, 2.0, 3.0], "value_loss": [0.5, math.inf, math.nan]}
    assert policy_curves.measured(columns, "value_loss") == ([1.0], [0.5])
