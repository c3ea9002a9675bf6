"""The results table and the verdicts below it, from files in the format that stages write."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.core import tables
from flows.report import round_files, summary
from stages.lib.core.files import write_text
from tests.flows.report.reading import all_ran
from tests.verdicts import failed_check

METRICS: dict[str, dict[str, Any]] = {
    "prepare": {"sft_train": 930, "pairs_train": 1187, "replayed": 0},
    "sft": {"loss_before": 5.17, "loss_after": 4.5},
    "reward": {"accuracy": 0.893, "accuracy_low": 0.855, "accuracy_high": 0.922, "margin": 3.1},
    "battery": {
        "best_of_n": {
            "1": {"judge_score": 0.28},
            "rise": 0.397,
            "rise_low": 0.306,
            "rise_high": 0.478,
        },
        "worst_ending": 0.405,
    },
    "ppo": {"score_mean": 2.58, "score_mean_first": -0.61, "kl": 6.3, "response_length": 12.4},
    "evaluate": {
        "win_rate": 0.81,
        "win_rate_low": 0.75,
        "win_rate_high": 0.86,
        "human_nll_rise": 0.512,
        "sft": {"judge_score": 0.258, "distinct_2": 0.859},
        "ppo": {"judge_score": 0.737, "distinct_2": 0.724},
    },
    "capability": {"worst": "xstest_unsafe", "worst_fall": 0.04},
    "replay": {
        "badcases": 41,
        "repaired": 9,
        "retested": 30,
        "repaired_by_chance": 2,
        "reversed_before": None,
        "reversed_after": None,
    }
    | {"guarded": 12, "regressed": 1},
}

LOCKS = all_ran(*(f"r{number}" for number in range(6)))


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def files(project: Path) -> Path:
    for stage, metrics in METRICS.items():
        write(project / f"rounds/r0/{stage}/metrics.json", metrics)
    write(project / "rounds/r1/sft/metrics.json", METRICS["sft"])
    return project


def rows(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells}


def test_numbers_of_each_round_and_dashes_for_what_is_missing(files: Path) -> None:
    assert round_files.known_rounds(all_ran("r1", "r0")) == ["r0", "r1"]
    table = rows(summary.markdown(["r0", "r1"], LOCKS))
    assert table[""] == ["r0", "r1"]
    assert table["SFT loss, nats per token"] == ["5.170 -> 4.500", "5.170 -> 4.500"]
    assert table["RM held-out accuracy [95%]"] == ["0.893 [0.855, 0.922]", "-"]
    assert table["judge score, RM's best of n - one sample [95%]"] == ["0.397 [0.306, 0.478]", "-"]
    assert table["RM pairs reversed by the worst ending"] == ["0.41", "-"]
    assert table["policy's reward, first -> selected"] == ["-0.61 -> 2.58", "-"]
    assert table["win rate against SFT [95%]"] == ["0.810 [0.750, 0.860]", "-"]
    assert table["judge score, SFT -> policy"] == ["0.26 -> 0.74", "-"]
    assert table["loss on human texts over SFT, nats per token"] == ["0.51", "-"]
    assert table["worst slice: drop against SFT"] == ["xstest_unsafe 0.040", "-"]
    assert table["badcases found"] == ["41", "-"]
    assert table["badcases repaired"] == ["9 of 30, 2 by chance", "-"]
    assert table["repaired badcases that regressed"] == ["1 of 12", "-"]
    assert table["demonstrations, pairs; replayed rows"] == ["930, 1187; 0", "-"]
    assert table["RM pairs reversed by exploits, before -> after"] == ["no exploits to retest", "-"]
    # why a number is missing, if its stage has run
    assert table["win rate against the champion [95%]"] == ["no champion yet", "-"]
    assert table["prompts needed to decide the win rate"] == ["decided", "-"]


def test_a_change_is_marked_and_sure_only_beyond_both_intervals(files: Path) -> None:
    """r0 has an accuracy of 0.893 [0.855, 0.922], a margin of 3.1, a worst ending of 0.405."""
    accuracies = {"r1": (0.96, 0.94, 0.98), "r2": (0.9, 0.86, 0.93), "r3": (0.9, 0.86, 0.93)}
    for name, (mean, low, high) in accuracies.items():
        accuracy = {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
        write(files / f"rounds/{name}/reward/metrics.json", accuracy | {"margin": 3.1})
    write(files / "rounds/r1/battery/metrics.json", {"worst_ending": 0.2})
    failed = failed_check("reward.accuracy_low", 0.86, ">= 0.88", bound="gates.reward.accuracy")
    verdict = {"gate": "reward", "round": "r2", "policy": "warn", "passed": False}
    verdict |= {"may_continue": True, "approval": None, "checks": [failed]}
    write(files / "reports/r2/gate_reward.json", verdict)
    table = {row.title: row for row in summary.rows(["r0", "r1", "r2", "r3"], LOCKS)}
    accuracy = table["RM held-out accuracy [95%]"]
    marks = [(cell.sign, cell.sure, cell.failed) for cell in accuracy.cells]
    assert marks == [
        ("", False, False),
        ("better", True, False),  # 0.94 is above 0.922
        ("worse", True, True),  # 0.93 is below 0.94
        ("", False, False),
    ]
    assert (accuracy.part, accuracy.wanted) == ("Reward model", "low end >= 0.8")
    endings = table["RM pairs reversed by the worst ending"].cells
    assert [(cell.sign, cell.sure) for cell in endings[:2]] == [("", False), ("better", False)]
    assert {cell.sign for cell in table["RM margin"].cells} == {""}  # it is the same
    assert table["SFT loss, nats per token"].wanted == "change >= 0.2"


def test_a_further_reward_has_a_row(files: Path) -> None:
    ppo = METRICS["ppo"] | {"score_solves": 0.75, "score_solves_first": 0.25}
    write(files / "rounds/r0/ppo/metrics.json", ppo)
    table = rows(summary.markdown(["r0", "r1"], LOCKS))
    assert table["policy's reward `solves`, first -> selected"] == ["0.25 -> 0.75", "-"]


def evaluated(files: Path, name: str, win_rate: float, id_: str, temperature: float) -> None:
    metrics = METRICS["evaluate"] | {
        "win_rate": win_rate,
        "win_rate_prompts_needed": 352,
        "evaluation_id": id_,
    }
    write(files / f"rounds/{name}/evaluate/metrics.json", metrics)
    write(
        files / f"rounds/{name}/evaluate/manifest.json",
        {"evaluation_id": id_, "evaluation": {"ppo.temperature": temperature, "seed": 0}},
    )


def test_a_round_with_other_thresholds_is_marked(files: Path) -> None:
    text = (files / "params.yaml").read_text()
    write_text(files / "rounds/r0/params.yaml", text)
    write_text(files / "rounds/r1/params.yaml", f"{text}gates: {{promote: {{win_rate: 0.4}}}}\n")
    assert not any("thresholds" in line for line in summary.notes(["r0", "r2"], LOCKS))
    lines = [line for line in summary.notes(["r0", "r1", "r2"], LOCKS) if "thresholds" in line]
    assert lines == [
        "r1: its gates had other thresholds than r0's (gates.promote.win_rate 0.5 and 0.4)",
        "r2: its gates had other thresholds than r1's (gates.promote.win_rate 0.4 and 0.5)",
    ]


def test_edited_numbers_of_an_ended_round_are_marked(files: Path) -> None:
    """Those of another round are no results: tests/flows/core/test_locks.py."""
    path = Path("rounds/r0/evaluate/metrics.json")
    recorded = {"path": str(path), "md5": hashlib.md5(path.read_bytes()).hexdigest()}
    locks = LOCKS | {"evaluate@r0": {"outs": [recorded]}}
    assert summary.edited_metrics(["r0"], locks) == []
    write(path, METRICS["evaluate"] | {"win_rate": 0.99})
    [line] = summary.edited_metrics(["r0"], locks)
    assert line.startswith(f"{path}: not the one that dvc.lock records")
    assert line in summary.notes(["r0"], locks)


def test_numbers_of_other_evaluations_are_in_rows_of_their_own(files: Path) -> None:
    for name, win_rate, id_, temperature in (
        ("r0", 0.6, "a", 1.0),
        ("r1", 0.7, "b", 0.7),
        ("r2", 0.8, "a", 1.0),
    ):
        evaluated(files, name, win_rate, id_, temperature)
    write(files / "rounds/r3/sft/metrics.json", METRICS["sft"])  # not evaluated yet
    text = summary.markdown(["r0", "r1", "r2", "r3"], LOCKS)
    table = rows(text)
    assert table["win rate against SFT [95%]"] == [
        "0.600 [0.750, 0.860]",
        "-",
        "0.800 [0.750, 0.860]",
        "-",
    ]
    assert table["win rate against SFT [95%] †"] == ["-", "0.700 [0.750, 0.860]", "-", "-"]
    assert table["prompts needed to decide the win rate †"] == ["-", "352", "-", "-"]
    # rows of other stages are not repeated
    assert table["SFT loss, nats per token"] == [
        "5.170 -> 4.500",
        "5.170 -> 4.500",
        "-",
        "5.170 -> 4.500",
    ]
    assert "SFT loss, nats per token †" not in table
    line = (
        "† r1 not comparable with r0: evaluated with other settings (ppo.temperature 1.0 and 0.7); "
        "run `rondo run --rerun r0`"
    )
    assert f"- {line}\n" in text and f"{line}\n" in summary.text(["r0", "r1", "r2"], LOCKS)


def test_rounds_of_one_evaluation_share_their_rows(files: Path) -> None:
    for name in ("r0", "r1"):
        evaluated(files, name, 0.6, "a", 1.0)
    text = summary.markdown(["r0", "r1"], LOCKS)
    assert rows(text)["win rate against SFT [95%]"] == ["0.600 [0.750, 0.860]"] * 2
    assert "†" not in text
    # a round without an evaluation id is not comparable either
    (files / "rounds/r1/evaluate/manifest.json").unlink()
    write(files / "rounds/r1/evaluate/metrics.json", METRICS["evaluate"])
    line = (
        "† r1 not comparable with r0: "
        "evaluated with other settings (a manifest.json does not contain them)"
    )
    assert line in summary.markdown(["r0", "r1"], LOCKS)


def test_an_interval_is_shown_if_it_is_known() -> None:
    assert tables.interval(0.88149, 0.8318, 0.9232) == "0.881 [0.832, 0.923]"
    assert tables.interval(0.5, None, None) == "0.500"


def test_report_writes_and_prints_the_results(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "dvc.yaml").touch()
    metrics = {"win_rate": 0.8, "win_rate_low": 0.7, "win_rate_high": 0.9}
    written = project / "rounds/r0/evaluate/metrics.json"
    write(written, metrics)
    md5 = hashlib.md5(written.read_bytes()).hexdigest()
    out = {"path": "rounds/r0/evaluate/metrics.json", "md5": md5}
    write(project / "dvc.lock", {"stages": {"evaluate@r0": {"outs": [out]}}})
    with pytest.raises(SystemExit) as ended:
        cli.main(["report"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    cell = "0.800 [0.700, 0.900]"
    assert cell in printed and "reports/report.html" in printed
    assert cell in (project / "reports/summary.md").read_text()
    assert cell in (project / "reports/report.html").read_text()


def test_a_win_rate_is_shown_with_its_judges_and_the_source_of_the_labels(files: Path) -> None:
    votes = {"win_rate_lexicon": 0.872, "win_rate_fluency": 0.5}
    jury = {
        "alone": {
            "lexicon": {"tie_share": 0.08, "comparisons": 40, "unparsable": 0},
            "fluency": {"kappa": 1.0, "comparisons": 40, "unparsable": 3},
        },
        "pairs": {"lexicon-fluency": {"agreement": 0.159, "kappa": 0.0}},
    }
    write(files / "rounds/r0/evaluate/metrics.json", METRICS["evaluate"] | votes | {"jury": jury})
    (files / "assets/data").mkdir(parents=True)
    (files / "assets/data/SOURCE.txt").write_text("Tweets.\nLabels: by the judge itself.\n")
    expected = [
        "r0: win rate against SFT by judge: lexicon 0.872 (8% ties); "
        "fluency 0.500 (3 of 40 comparisons without readable answers); "
        "lexicon-fluency agree on 16%",
        "Labels: by the judge itself.",
    ]
    assert summary.judge_lines(["r0", "r1"], LOCKS) == expected
    of_people = "r0: no person has judged it yet: `rondo label r0`"
    assert summary.judge_lines(["r0"], LOCKS) == [expected[0], of_people, expected[1]]
    assert all(line in summary.markdown(["r0"], LOCKS) for line in expected)
    assert all(line in summary.text(["r0"], LOCKS) for line in expected)
