"""The results table and the verdicts below it, from files in the format that stages write."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.core import tables
from flows.report import summary
from tests.flows.report.reading import all_ran

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
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for stage, metrics in METRICS.items():
        write(tmp_path / f"rounds/r0/{stage}/metrics.json", metrics)
    write(tmp_path / "rounds/r1/sft/metrics.json", METRICS["sft"])
    return tmp_path


def rows(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells}


def test_numbers_of_each_round_and_dashes_for_what_is_missing(files: Path) -> None:
    assert summary.known_rounds(all_ran("r1", "r0")) == ["r0", "r1"]
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
    assert table["RM pairs reversed by exploits, before -> after"] == ["-", "-"]


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


def gate(
    passed: bool, may_continue: bool, approval: dict[str, Any] | None = None
) -> dict[str, Any]:
    check = {
        "metric": "reward.accuracy_low",
        "value": 0.7,
        "threshold": ">= 0.8",
        "passed": passed,
        "next_step": "Look at the data.",
    }
    facts = {
        "gate": "reward",
        "round": "r0",
        "policy": "ask" if approval else "warn" if may_continue else "block",
    }
    return {
        **facts,
        "passed": passed,
        "may_continue": may_continue,
        "approval": approval,
        "checks": [check],
    }


def test_the_first_failed_gate_names_the_stage_at_fault(files: Path) -> None:
    for name in ("r0", "r1", "r2", "r3", "r4", "r5"):
        write(files / f"rounds/{name}/reward/metrics.json", {"accuracy_low": 0.7})
    for name in ("sft", "reward", "promote"):
        write(files / f"reports/r0/gate_{name}.json", gate(passed=True, may_continue=True))
        write(
            files / f"reports/r3/gate_{name}.json", gate(passed=name != "reward", may_continue=True)
        )
    write(files / "reports/r1/gate_sft.json", gate(passed=True, may_continue=True))
    write(files / "reports/r1/gate_reward.json", gate(passed=False, may_continue=False))
    approval = {
        "approved": True,
        "by": "Ada",
        "reason": "seen by hand",
        "failed": {"reward.accuracy_low": 0.7},
    }
    write(
        files / "reports/r4/gate_sft.json", gate(passed=False, may_continue=True, approval=approval)
    )
    # PPO on a reward model whose gate only warned
    for name in ("sft", "reward", "promote"):
        verdict = gate(passed=name == "sft", may_continue=name != "promote")
        write(files / f"reports/r5/gate_{name}.json", verdict)
    # all three only warned
    for name in ("sft", "reward", "promote"):
        write(files / f"reports/r2/gate_{name}.json", gate(passed=False, may_continue=True))
    failed = "reward.accuracy_low 0.7, wanted >= 0.8"
    assert summary.verdict_lines(["r0", "r1", "r2", "r3", "r4", "r5"], LOCKS) == [
        "r0: all gates passed",
        f"r1: the reward model is at fault: {failed}. Look at the data.",
        f"r2: SFT is at fault (policy: warn): {failed}. Look at the data."
        f"; reward gate: failed (policy: warn): {failed}"
        f"; promote gate: failed (policy: warn): {failed}",
        f"r3: the reward model is at fault (policy: warn): {failed}. Look at the data.",
        f"r4: has not reached the reward gate; sft gate: approved by Ada (seen by hand): {failed}",
        f"r5: the reward model is at fault: {failed}. Look at the data.; promote gate: failed:"
        f" {failed}",
    ]


@pytest.mark.parametrize(
    ("manifest", "name"),
    [({}, "PPO"), ({"algorithm": "dpo"}, "DPO"), ({"algorithm": "best_of_n"}, "best-of-n")],
)
def test_the_algorithm_that_trained_the_policy_is_at_fault(
    files: Path, manifest: dict[str, str], name: str
) -> None:
    write(files / "rounds/r0/reward/metrics.json", {"accuracy_low": 0.7})
    for gate_name in ("sft", "reward", "promote"):
        passed = gate_name != "promote"
        write(files / f"reports/r0/gate_{gate_name}.json", gate(passed=passed, may_continue=passed))
    write(files / "rounds/r0/ppo/manifest.json", manifest)
    [line] = summary.verdict_lines(["r0"], LOCKS)
    assert line.startswith(f"r0: {name} is at fault: ")


@pytest.mark.parametrize(
    ("low", "high", "needed", "verdict"),
    [
        (0.51, 0.62, None, "helped"),
        (0.38, 0.49, None, "hurt"),
        (0.49, 0.6, 230, "no difference shown (about 230 prompts would decide)"),
        (0.5, 0.5, None, "no difference shown"),
    ],
)
def test_whether_a_round_helped_at_equal_kl(files: Path, low, high, needed, verdict) -> None:
    values = {"": 0.55, "_low": low, "_high": high, "_prompts_needed": needed}
    equal_kl = {f"win_rate_champion_equal_kl{end}": value for end, value in values.items()}
    metrics = METRICS["evaluate"] | {"champion_round": "r0"} | equal_kl
    write(files / "rounds/r1/evaluate/metrics.json", metrics)
    table = summary.markdown(["r0", "r1"], LOCKS)
    cell = f"0.550 [{low:.3f}, {high:.3f}]"
    assert rows(table)["win rate against the champion at equal KL [95%]"] == ["-", cell]
    lines = [line for line in table.splitlines() if line.startswith("- r")]
    assert "at equal KL" not in lines[0]
    assert lines[1].endswith(f"; at equal KL, the round against r0: {verdict}")


def test_a_jury_that_labelled_the_reward_models_pairs_is_no_proof_that_a_round_helped(files: Path):
    equal_kl = {f"win_rate_champion_equal_kl{end}": 0.6 for end in ("", "_low", "_high")}
    evaluate = METRICS["evaluate"] | {"champion_round": "r0"} | equal_kl
    write(files / "rounds/r1/evaluate/metrics.json", evaluate)
    # the pairs of r1 are for r2's reward model
    for name, pairs in {"r0": 382, "r1": 100}.items():
        write(files / f"rounds/{name}/replay/metrics.json", {"policy_pairs": pairs})
    caution = "But the jury labelled 382 pairs that its reward model learnt from"
    assert caution in summary.verdict_lines(["r0", "r1"], LOCKS)[1]
    worse = {f"win_rate_champion_equal_kl{end}": 0.4 for end in ("", "_low", "_high")}
    write(files / "rounds/r1/evaluate/metrics.json", evaluate | worse)
    assert "But the jury" not in summary.verdict_lines(["r0", "r1"], LOCKS)[1]


@pytest.mark.parametrize(
    ("start", "caution"),
    [
        (
            "rounds/r0/ppo/policy",
            ". Its PPO continued from rounds/r0/ppo/policy, so the policy had more updates"
            " (docs/rounds.md)",
        ),
        ("rounds/r1/sft/model", ""),
    ],
)
def test_a_policy_that_went_on_from_the_champion_had_more_updates(
    files: Path, start: str, caution: str
):
    equal_kl = {f"win_rate_champion_equal_kl{end}": 0.6 for end in ("", "_low", "_high")}
    evaluate = METRICS["evaluate"] | {"champion_round": "r0"} | equal_kl
    write(files / "rounds/r1/evaluate/metrics.json", evaluate)
    write(files / "rounds/r1/ppo/manifest.json", {"started_from": start})
    assert summary.verdict_lines(["r0", "r1"], LOCKS)[1].endswith(f"against r0: helped{caution}")


def test_a_policy_that_does_not_beat_the_champion_is_nobodys_fault(files: Path) -> None:
    lost = {
        "metric": "evaluate.win_rate_champion_low",
        "value": 0.36,
        "threshold": ">= 0.38",
        "passed": False,
        "next_step": "Look.",
    }
    far = {
        "metric": "evaluate.ppo.kl_per_token",
        "value": 0.9,
        "threshold": "<= 0.6",
        "passed": False,
        "next_step": "Nearer.",
    }
    verdict = gate(passed=False, may_continue=False)
    for name in ("r0", "r1"):
        metrics = {"win_rate_champion_low": 0.36, "ppo": {"kl_per_token": 0.9}}
        write(files / f"rounds/{name}/evaluate/metrics.json", metrics)
    write(files / "reports/r0/gate_promote.json", verdict | {"checks": [lost]})
    write(files / "reports/r1/gate_promote.json", verdict | {"checks": [lost, far]})
    below_champion = "evaluate.win_rate_champion_low 0.36, wanted >= 0.38. Look."
    too_far = "evaluate.ppo.kl_per_token 0.9, wanted <= 0.6. Nearer."
    assert summary.verdict_lines(["r0", "r1"], LOCKS) == [
        f"r0: not promoted, the champion stays: {below_champion}",
        f"r1: PPO is at fault: {below_champion}; {too_far}",
    ]


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
    assert all(line in summary.markdown(["r0"], LOCKS) for line in expected)
    assert all(line in summary.text(["r0"], LOCKS) for line in expected)
