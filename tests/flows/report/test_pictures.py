"""Charts of the battery and of the evaluation, from metrics in the format of stages."""

from pathlib import Path
from typing import Any

import pytest

from flows.report import pictures
from flows.report.charts import Chart
from flows.report.round_data import read_round
from stages.battery.metrics import MIN_SLICE_PAIRS
from stages.lib.core.files import stage_dir, write_json
from stages.lib.core.params import load_params
from tests.flows.report.reading import all_ran

RATE = {"rate": 0.1, "low": 0.05, "high": 0.2}
ENDING = RATE | {"against_judge": 0.31, "against_judge_low": 0.2, "against_judge_high": 0.4}
SLICE = {"accuracy": 0.6, "low": 0.5, "high": 0.7}
BATTERY = {
    "probes": {
        "word_salad": RATE | {"texts": 9},
        "prompt_swapped": RATE | {"texts": 9},
        "truncated": dict.fromkeys(RATE) | {"texts": 0},
    },
    "flips": {"typo": RATE | {"rate": 0.2, "pairs": 8}},
    "endings": {"ending_1": ENDING | {"pairs": 7}},
    "endings_text": [" !"],
    "mined": {"1": ENDING | {"against_judge": None, "pairs": 7}},
    "mined_text": [" fun"],
    "accuracy": {"source": {"tweets": SLICE | {"pairs": 30}, "mail": SLICE | {"pairs": 29}}},
}
JUDGED = {"judge_score": 0.3, "judge_score_low": 0.25, "judge_score_high": 0.35, "distinct_2": 0.9}
EVALUATION = {
    "sft": JUDGED | {"kl": 0.0, "score": -1.0},
    "ppo": JUDGED | {"kl": 1.5, "score": 0.2},
    "checkpoints": {
        "step_00010": JUDGED | {"kl": 2.0, "score": 0.1},
        "step_00020": JUDGED | {"kl": 1.5, "score": 0.2, "win_rate": 0.7},  # the policy itself
    },
}


def drawn(stage: str, metrics: dict[str, dict[str, Any]]) -> dict[str, Chart]:
    """Charts by title, of rounds with these metrics."""
    for name, values in metrics.items():
        write_json(stage_dir(name, stage) / "metrics.json", values)
    rounds = [(read_round(name, all_ran(name)), load_params()) for name in metrics]
    return {chart.title: chart for chart in pictures.PICTURES[stage](rounds)}


def texts(chart: Chart) -> dict[str, str]:
    return {row["label"]: row["text"] for row in chart.spec["data"]["values"]}


def test_a_bar_is_what_its_gate_counts(project: Path) -> None:
    """With the thresholds of the default run: probe 0.25, flip 0.2, ending 0.3, slice 0.65."""
    by_title = drawn("battery", {"r0": BATTERY})
    assert {title: texts(chart) for title, chart in by_title.items()} == {
        "Corrupted text scores above the original": {"word salad": "0.10, n 9 ✓"},
        "Edit that keeps the meaning reverses a correct pair": {"typo": "0.20, n 8 ✓"},
        "Appended ending reverses a correct pair against the judge": {"' !'": "0.31, n 7 ✗ fails"},
        "Accuracy by kind of pair": {
            "source: tweets": "0.60, n 30 ✗ fails",
            "source: mail": "0.60, n 29",
        },
    }
    assert pictures.SLICE_PAIRS == MIN_SLICE_PAIRS


def test_a_battery_that_measured_nothing_has_no_chart(project: Path) -> None:
    assert drawn("battery", {"r0": {"centre": 0.0}}) == {}


def test_the_models_of_an_evaluation_by_kl_with_their_intervals(project: Path) -> None:
    by_title = drawn("evaluate", {"r0": EVALUATION, "r1": EVALUATION})
    assert list(by_title) == [title for title, _, _ in pictures.EVALUATION]
    rows = by_title["Judge score over KL"].spec["data"]["values"]
    assert [row["round"] for row in rows] == ["r0", "r1"]
    assert rows[0]["name"] == ["SFT", "policy", "update 10"] and rows[0]["x"] == [0, 1.5, 2]
    assert (rows[0]["low"], rows[0]["high"]) == ([0.25] * 3, [0.35] * 3)
    domains = {str(chart.spec["layer"][0]["encoding"]["x"]["scale"]) for chart in by_title.values()}
    assert len(domains) == 1  # they share x
    marked = by_title["Judge score over KL"].spec["layer"][-1]["data"]["values"]
    assert [(row["round"], row["x"], row["y"]) for row in marked] == [
        ("r0", 1.5, 0.3),
        ("r1", 1.5, 0.3),
    ]


@pytest.mark.parametrize("missing", ["score", "judge_score_low"])
def test_what_was_not_measured_is_left_out(project: Path, missing: str) -> None:
    models = {name: EVALUATION[name] | {missing: None} for name in ("sft", "ppo")}
    by_title = drawn("evaluate", {"r0": models})
    assert ("Reward model's score over KL" in by_title) == (missing != "score")
    [row] = by_title["Judge score over KL"].spec["data"]["values"]
    assert ("low" in row) == (missing == "score")
    assert drawn("evaluate", {"r0": {}}) == {}
