"""The policy's curves: a band that is drawn has to be where the sign itself says so."""

import math
import re
from pathlib import Path

import pytest

from flows.report import charts, page, policy_curves
from flows.report.round_data import Round, read_round
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import SIGNS, WINDOW, HealthCheck, MetricHistory
from tests.flows.report.reading import Page

PPO = PpoParams()
ASIDE = 0.001
# A run of 15 updates at which there is nothing to say, of which the last 5 stay where a test leaves
# them.
START = {
    "kl": 3.0,
    "reward_mean": -1.5,
    "reward_std": 0.8,
    "entropy": 4.0,
    "distinct_2": 0.9,
    "ending_share": 0.2,
    "repetition_3": 0.02,
}
START |= {
    "score_judge_correlation": 0.6,
    "response_length": 12.0,
    "value_loss": 0.5,
    "clip_fraction": 0.1,
}
DRAWN = [column for _, columns, _ in policy_curves.CURVES for column in columns]


def run(column: str, value: float) -> dict[str, list[float]]:
    """Columns of 20 updates; `column` comes to `value`, and the reward rises, without which length
    is no sign.
    """
    updates = 3 * WINDOW
    ends = START | {"reward_mean": 1.0} | {column: value}
    columns = {name: [start] * updates + [ends[name]] * WINDOW for name, start in START.items()}
    return {"step": [float(n + 1) for n in range(updates + WINDOW)], **columns}


def says(sign: HealthCheck, columns: dict[str, list[float]]) -> bool:
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return bool(sign.read(MetricHistory(rows), PPO)[0])


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.name)
def test_every_sign_has_a_curve_and_speaks_on_one_side_of_its_band_alone(sign: HealthCheck) -> None:
    assert sign.column in DRAWN
    band = policy_curves.bound(sign, run(sign.column, START[sign.column]), PPO)
    assert band is not None
    below, above = (says(sign, run(sign.column, band + aside)) for aside in (-ASIDE, ASIDE))
    assert below != above
    upwards = "more" in sign.band or "above" in sign.band
    assert (below, above) == ((True, False) if upwards else (False, True))


def test_bands_by_hand() -> None:
    columns, signs = run("kl", 3.0), {sign.name: sign for sign in SIGNS}
    found = {name: policy_curves.bound(sign, columns, PPO) for name, sign in signs.items()}
    assert found["kl above budget"] == PPO.max_kl and found["no movement"] == PPO.min_kl
    assert found["entropy collapse"] == pytest.approx(2.0)  # half of 4
    assert found["length hack"] == pytest.approx(15.6)  # 1.3 times 12
    assert found["one ending for all prompts"] == pytest.approx(0.35)  # 0.15 more than 0.2
    assert found["reward does not move"] == pytest.approx(-1.42)  # a tenth of 0.8 more than -1.5
    assert found["value loss explodes"] == pytest.approx(2.5)  # five times 0.5
    # the first updates count, and those before validation had no value
    climbing = {
        "step": [float(n) for n in range(1, 11)],
        "entropy": [4.0, 4.5, 5.0, 5.5, 6.0, *[1.0] * 5],
    }
    assert policy_curves.bound(signs["entropy collapse"], climbing, PPO) == pytest.approx(2.5)
    assert (
        policy_curves.bound(
            signs["entropy collapse"], {name: values[:9] for name, values in climbing.items()}, PPO
        )
        is None
    )
    assert policy_curves.bound(signs["kl above budget"], {}, PPO) == PPO.max_kl


def told() -> Round:
    found = [
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
        },  # no such row
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
        {"findings": [row | {"cause": "<script>", "first_fix": "none"} for row in found]},
    )
    write_json(stage_dir("r0", "ppo") / "metrics.json", {"policy_update": 8})
    columns = run("response_length", 24.0) | {"validation_kl": [math.nan] * 19 + [3.5]}
    rows = (
        ",".join("" if math.isnan(value) else str(value) for value in row)
        for row in zip(*columns.values(), strict=True)
    )
    write_text(stage_dir("r0", "ppo") / "curves.csv", "\n".join([",".join(columns), *rows, ""]))
    return read_round("r0", {})


def test_what_was_found_and_kept_is_on_the_curve_that_it_is_about(project: Path) -> None:
    found = policy_curves.marks(told(), ("response_length",), PPO)
    assert found == charts.Marks(
        {"length hack: 15.6": pytest.approx(15.6)},
        {"kept: update 8": 8},
        {"warn: length hack, update 12": (12, 12.0)},
    )
    assert not policy_curves.marks(told(), ("entropy",), PPO).spots
    text = page.write(["r0"]).read_text()
    titles = [title for title, columns, _ in policy_curves.CURVES if set(columns) & set(START)]
    assert Page(text).pictures == titles
    assert (
        text.count("kept: update 8") == len(titles)
        and text.count("warn: length hack, update 12") == 1
    )
    assert "var(--bad)" in text and "<script>" not in text


def test_a_band_far_from_its_curve_is_said_and_leaves_the_curve_its_shape() -> None:
    points = ([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    for at, named in ((4.0, 4.0), (1000.0, 2.0)):  # what the height's last number is
        picture = charts.lines(
            "A", {"kl": points}, "update", "nats", charts.Marks({f"budget {at:g}": at})
        )
        assert f">budget {at:g}<" in picture
        assert max(float(number) for number in re.findall(r">([\d.]+)</text>", picture)) == max(
            named, 3.0
        )  # 3: the last update
