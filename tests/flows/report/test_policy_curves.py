"""Charts of PPO's training: a drawn threshold is where the health check itself fires."""

import math
import re
from pathlib import Path

import pytest

from flows.report import charts, page, policy_curves
from flows.report.round_data import RoundResults, read_round
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import HEALTH_CHECKS, WINDOW, HealthCheck, MetricHistory
from tests.flows.report.reading import Page, all_ran

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
    "clip_fraction": 0.1,
}
DRAWN = [column for _, columns, _ in policy_curves.CURVES for column in columns]


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


def results() -> RoundResults:
    """A run with a length hack in its last updates, whose policy of update 8 was selected."""
    findings = [
        {
            "sign": "length hack",
            "verdict": "warn",
            "update": 12,
            "metric": "response_length, last / first",
            "value": 1.4,
        },
        {
            "sign": "length hack",
            "verdict": "danger",
            "update": 99,
            "metric": "response_length, last / first",
            "value": 1.7,
        },  # the curves have no such update
        {
            "sign": "nothing gained",
            "verdict": "warn",
            "update": 0,
            "metric": "policy_update",
            "value": 0,
        },
    ]
    write_json(
        stage_dir("r0", "ppo") / "health.json",
        {"findings": [row | {"cause": "<script>", "first_fix": "none"} for row in findings]},
    )
    write_json(stage_dir("r0", "ppo") / "metrics.json", {"policy_update": 8})
    columns = run("response_length", 24.0) | {"validation_kl": [math.nan] * 19 + [3.5]}
    rows = (
        ",".join("" if math.isnan(value) else str(value) for value in row)
        for row in zip(*columns.values(), strict=True)
    )
    write_text(stage_dir("r0", "ppo") / "curves.csv", "\n".join([",".join(columns), *rows, ""]))
    return read_round("r0", all_ran("r0"))


def test_findings_and_the_selected_update_are_marked_on_their_curves(project: Path) -> None:
    marks = policy_curves.marks(results(), ("response_length",), PPO)
    assert marks == charts.Marks(
        {"length hack: 15.6": pytest.approx(15.6)},
        {"selected: update 8": 8},
        {"warn: length hack, update 12": (12, 12.0)},
    )
    assert not policy_curves.marks(results(), ("entropy",), PPO).points
    text = page.write(["r0"], all_ran("r0")).read_text()
    titles = [title for title, columns, _ in policy_curves.CURVES if set(columns) & set(START)]
    assert Page(text).pictures == titles
    assert text.count("selected: update 8") == len(titles)
    assert text.count("warn: length hack, update 12") == 1
    assert "var(--bad)" in text


def test_a_bound_far_from_its_curve_is_only_in_the_legend() -> None:
    curve = ([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    for bound, top_label in ((4.0, 4.0), (1000.0, 2.0)):  # of the y axis
        marks = charts.Marks({f"budget {bound:g}": bound})
        picture = charts.lines("A", {"kl": curve}, "update", "nats", marks)
        assert f">budget {bound:g}<" in picture
        labels = [float(number) for number in re.findall(r">([\d.]+)</text>", picture)]
        assert max(labels) == max(top_label, 3.0)  # 3: the last label of the x axis
