"""The report, from files in the format that stages write."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from flows.core.locks import current_locks
from flows.report import charts, page
from flows.report.round_data import extreme_samples
from flows.report.round_files import STAGES
from stages.lib.core.files import read_jsonl, stage_dir, write_json, write_jsonl, write_text
from stages.lib.core.params import load_params
from stages.replay.badcases import Badcase, Cause, Retest, ledger_path
from tests.flows.report.reading import Page, all_ran
from tests.paths import ROOT
from tests.verdicts import failed_check, passed_check

RATE = {"rate": 0.1, "low": 0.05, "high": 0.2, "pairs": 40}
AGAINST = {"against_judge": 0.1, "against_judge_low": 0.05, "against_judge_high": 0.2}
JUDGED = {"judge_score": 0.3, "judge_score_low": 0.25, "judge_score_high": 0.35}
EVALUATION = {
    "prompts": 9,
    "sft": JUDGED | {"kl": 0.0, "score": -1.0, "distinct_2": 0.9},
    "ppo": JUDGED | {"kl": 1.5, "score": 0.2, "distinct_2": 0.8},
    "checkpoints": {},
}
SIDE = {"accuracy": 0.9, "low": 0.8, "high": 0.95, "pairs": 40}
BATTERY = {
    "probes": {"empty": RATE},
    "flips": {"lower_case": RATE, "typo": dict.fromkeys(RATE)},
    "endings": {"ending_1": RATE | AGAINST},
    "endings_text": [" <b>!"],
    "mined": {},
    "mined_text": [],
    "accuracy": {"length": {"alike": SIDE}},
}


FAULT = {"fault": "it ranks <badly>", "next_step": "Look at <the> data"}
WARNING = failed_check("reward.accuracy_low", 0.71, ">= 0.8", passed=True, name="a warning")


def check(passed: bool) -> dict[str, object]:
    row = failed_check("reward.accuracy_low", 0.71, ">= 0.8", **FAULT)
    return {
        "gate": "reward",
        "round": "r0",
        "passed": passed,
        "may_continue": passed,
        "policy": "block",
        "approval": None,
        "checks": [passed_check("reward.accuracy_low", 0.71, ">= 0.8") if passed else row, WARNING],
    }


def write_round(name: str) -> None:
    for gate, passed in (("sft", True), ("reward", False)):
        write_json(Path(f"reports/{name}/gate_{gate}.json"), check(passed))
    write_json(stage_dir(name, "reward") / "metrics.json", {"accuracy_low": 0.71})
    write_json(stage_dir(name, "battery") / "metrics.json", BATTERY)
    write_json(
        stage_dir(name, "capability") / "metrics.json",
        {"slices": {"mine_safe": {"prompts": 9, "sft": 1, "policy": 0.5, "fall": 0.5}}},
    )
    write_text(
        stage_dir(name, "ppo") / "curves.csv",
        "step,score_mean,kl,validation_kl\n1,0.1,0.0,\n2,0.4,1.5,1.4\n",
    )
    write_json(stage_dir(name, "evaluate") / "metrics.json", EVALUATION)
    finding = {
        "sign": "length hack",
        "verdict": "warn",
        "update": 17,
        "metric": "response_length",
        "value": 1.364,
        "threshold": "1.3 or less",
    }
    write_json(
        stage_dir(name, "ppo") / "health.json",
        {"findings": [finding | {"cause": "it pays for length", "first_fix": "a penalty"}]},
    )
    sample = {
        "id": "q",
        "sample": 0,
        "prompt": "Our <i>day",
        "sft": " was\nfine",
        "ppo": "<script>alert(1)</script>",
        "base": "",
    }
    sample |= {
        f"{model}_{metric}": 0.25
        for model in ("base", "sft", "ppo")
        for metric in ("judge_score", "score")
    }
    write_jsonl(stage_dir(name, "evaluate") / "samples.jsonl", [sample])


def chart(html: Page, title: str) -> list[dict[str, Any]]:
    """The rows of a chart."""
    rows: list[dict[str, Any]]
    rows = json.loads(html.chart_data)["specs"][html.pictures.index(title)]["data"]["values"]
    return rows


def test_a_run_that_stopped_at_a_gate(project: Path) -> None:
    write_round("r0")
    slices = stage_dir("r0", "capability") / "metrics.json"
    row = json.loads(slices.read_text())["slices"]["mine_safe"] | {
        "fall_low": 0.2,
        "fall_high": 0.8,
    }
    write_json(slices, {"slices": {"mine_safe": row}})
    case = Badcase(
        id="abc",
        round="r0",
        cause=Cause.no_eos,
        origin=4,
        prompt_id="p",
        prompt="It",
        response=" was & was",
        score=1.5,
        sentiment=0.0,
        sentiment_plain=0.0,
        repetition=0.0,
        tries=[Retest(round="r0", fired=3, of=4, ranked=True)],
    )
    write_jsonl(ledger_path("r0"), [case.model_dump(mode="json")])
    text = page.write(["r0"], all_ran("r0")).read_text()
    html = Page(text)
    assert html.open_tags == [] and html.fetched == []
    # the first screen names the stage at fault and the next step
    visible = " ".join(" ".join(html.words).split())
    answer = (
        "The reward model is at fault It ranks <badly> (the reward.accuracy_low, low end: 0.71,"
    )
    assert answer in visible and "Do next Look at <the> data. Then run again: rondo run" in visible
    assert "Reward model ✗ failed the reward.accuracy_low 0.71 wanted >= 0.8" in visible
    warning = "! a warning reward.accuracy_low 0.71 >= 0.8 It is bad. Look at the data"
    assert warning in visible and "✗ a warning" not in visible
    assert (
        "warn at update 17: length hack, response_length 1.36. it pays for length. First: a penalty"
        in html.words
    )
    # a text of a model is never HTML
    assert "<script>alert(1)</script>" in html.words and text.count("<script>alert(1)") == 0
    assert "was ↵ fine" in html.words and "(empty)" in html.words and "was & was" in html.words
    assert "mine_safe" in html.words and "0.5 [0.2, 0.8]" in html.words and "r0 3/4" in html.words
    assert html.pictures == [
        "Corrupted text scores above the original",
        "Edit that keeps the meaning reverses a correct pair",
        "Appended ending reverses a correct pair against the judge",
        "Accuracy by kind of pair",
        "Reward model's score",
        "KL from SFT per sequence",
        "Judge score over KL",
        "Reward model's score over KL",
        "Variety across prompts over KL",
    ]
    assert len(json.loads(html.chart_data)["specs"]) == len(html.pictures)
    # wide tables can be scrolled by keyboard
    regions = re.findall(r'<div class="wide"([^>]*)>', text)
    assert len(regions) >= 5 and all(
        'tabindex="0"' in region and "aria-label=" in region for region in regions
    )
    # ids of different pictures differ
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_clone_shows_the_committed_run_as_a_record(project: Path) -> None:
    """git has the metrics and dvc.lock, and neither verdicts nor badcases."""
    for name in ("dvc.lock", "params.yaml"):
        shutil.copy(ROOT / name, name)
    for path in (ROOT / "rounds").glob("*/*/metrics.json"):
        copy = project / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    html = Page(page.write(["r0", "r1"], current_locks()).read_text())
    committed = json.loads((ROOT / "rounds/r0/evaluate/metrics.json").read_text())
    rate, low, high = (committed[f"win_rate{end}"] for end in ("", "_low", "_high"))
    assert f"{rate:.3f} [{low:.3f}, {high:.3f}]" in html.words and "not reached" not in html.words
    assert "None yet." not in html.words and "Their texts are not in this folder." in html.words
    assert any("This is a record" in words for words in html.words)
    assert html.pictures.count("Accuracy by kind of pair") == 1
    assert {"r0", "r1"} <= {row["round"] for row in chart(html, "Accuracy by kind of pair")}


def test_a_round_that_params_do_not_have_is_shown_with_todays_thresholds(project: Path) -> None:
    """E.g. after a preset with one round in a clone whose results have two."""
    assert "r9" not in load_params().rounds
    (project / "rounds/r9/ppo").mkdir(parents=True, exist_ok=True)
    (project / "rounds/r9/ppo/curves.csv").write_text("step,kl_per_token\n1,0.0\n2,0.3\n")
    text = page.write(["r0", "r9"], all_ran("r0", "r9")).read_text()
    assert "kl above budget (ppo.max_kl_per_token): 0.7" in text


def test_the_newest_rounds_are_shown_at_first_and_all_can_be_chosen(project: Path) -> None:
    names = [f"r{number}" for number in range(6)]
    for name in names:
        write_round(name)
        write_json(stage_dir(name, "capability") / "metrics.json", {})
    text = page.write(names, all_ran(*names)).read_text()
    boxes = re.findall(r'<input type="checkbox" name="shown" value="(\w+)"( checked)?>', text)
    assert boxes == [(name, " checked" if name > "r1" else "") for name in names]
    for spec in json.loads(Page(text).chart_data)["specs"]:
        assert spec["params"] == [{"name": "shown", "value": names[2:]}]
        assert {row["round"] for row in spec["data"]["values"]} == set(names)


def test_before_anything_has_run(project: Path) -> None:
    html = Page(page.write(["r0"], all_ran("r0")).read_text())
    assert html.open_tags == [] and html.pictures == [] and html.words.count("not reached") == 3
    assert html.chart_data == "" and "vegaEmbed" not in page.REPORT.read_text()
    assert Page(page.write([], all_ran()).read_text()).open_tags == []


def test_the_best_and_the_worst_samples_once_each() -> None:
    rows = [{"id": n, "sft_judge_score": 0.0, "ppo_judge_score": n / 10} for n in range(6)]
    assert [row["id"] for row in extreme_samples(rows)] == [5, 4, 3, 2, 1, 0]
    worse_rows = [{**row, "id": row["id"] + 6, "ppo_judge_score": -1.0} for row in rows]
    assert [row["id"] for row in extreme_samples([*rows, *worse_rows])][:4] == [5, 4, 3, 2]


def test_a_page_that_cannot_be_written_does_not_undo_the_run(project: Path) -> None:
    from flows.pipeline import write_report

    lines: list[str] = []
    write_report(["r0"], all_ran("r0"), lines.append)
    assert lines.pop().endswith("reports/report.html")
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", [{"id": "of another version"}])
    write_report(["r0"], all_ran("r0"), lines.append)
    assert "failed (BadInput" in lines[0] and "`rondo report` tries again" in lines[0]
    assert not page.REPORT.exists()  # the one before would be taken for this run's


def test_an_approved_gate_and_one_with_a_warning_are_neither_passed_nor_failed(
    project: Path,
) -> None:
    approval = {"approved": True, "by": "Ada", "reason": "seen by hand", "failed": {}}
    verdicts = {
        "sft": check(False) | {"may_continue": True, "policy": "ask", "approval": approval},
        "reward": check(False) | {"may_continue": True, "policy": "warn"},
        "promote": check(False) | {"policy": "ask", "approval": approval | {"approved": False}},
    }
    for gate, verdict in verdicts.items():
        write_json(Path(f"reports/r0/gate_{gate}.json"), verdict)
    write_json(stage_dir("r0", "reward") / "metrics.json", {"accuracy_low": 0.71})
    text = page.write(["r0"], all_ran("r0")).read_text()
    words = Page(text).words
    assert [word for word in words if word in ("✓", "!", "✗")] == ["!", "✗", "✗"]
    assert text.count('class="gate warn"') == 1 and text.count('class="gate bad"') == 2
    assert "approved by Ada: seen by hand" in words and "refused by Ada: seen by hand" in words
    assert "failed; the run went on, since the gate only warns" in words


def unmeasured(value: Any) -> Any:
    """A value of JSON with null in place of each number that is not a count."""
    if isinstance(value, dict):
        return {key: unmeasured(entry) for key, entry in value.items()}
    return None if isinstance(value, float) else value


def test_a_report_of_rates_of_nothing(project: Path) -> None:
    """A rate of no texts is null, e.g. of a probe that shuffles the words of one-word responses."""
    nothing = dict.fromkeys(RATE) | {"texts": 0}
    write_round("r0")
    write_json(stage_dir("r0", "capability") / "metrics.json", {})
    write_json(stage_dir("r0", "battery") / "metrics.json", BATTERY | {"probes": {"a": nothing}})
    title = "Corrupted text scores above the original"
    assert title not in Page(page.write(["r0"], all_ran("r0")).read_text()).pictures
    probes = {"probes": {"a": nothing, "b": RATE}}
    write_json(stage_dir("r0", "battery") / "metrics.json", BATTERY | probes)
    html = Page(page.write(["r0"], all_ran("r0")).read_text())
    assert [row["name"] for row in chart(html, title)] == ["b"]


def test_a_report_without_any_measured_number(project: Path) -> None:
    """The metrics of the committed default run, with null for each share and mean."""
    write_round("r0")
    for stage in STAGES:
        metrics = json.loads((ROOT / f"rounds/r1/{stage}/metrics.json").read_text())
        write_json(stage_dir("r0", stage) / "metrics.json", unmeasured(metrics))
    samples = stage_dir("r0", "evaluate") / "samples.jsonl"
    unscored = {"id": "q", "sample": 0, "prompt": "A", "sft": "b", "ppo": "c"}
    write_jsonl(samples, [unscored, *read_jsonl(samples, "")])
    html = Page(page.write(["r0"], all_ran("r0")).read_text())
    assert "win rate against SFT [95%]" not in html.words  # a row without a number
    assert "badcases found" in html.words and "Our <i>day" in html.words


def test_texts_of_people_and_models_are_never_html(project: Path) -> None:
    evil = "--><script>alert('x')</script> $\\nothing$ <img src=x onerror=y>"
    write_round("r0")
    battery = BATTERY | {
        "endings_text": [evil],
        "mined": {"1": RATE | AGAINST},
        "mined_text": [evil],
        "probes": {evil: RATE},
    }
    write_json(stage_dir("r0", "battery") / "metrics.json", battery)
    slices = {
        evil: {
            "prompts": 9,
            "sft": 1,
            "policy": 0.5,
            "fall": 0.5,
            "fall_low": 0.2,
            "fall_high": 0.8,
        }
    }
    write_json(stage_dir("r0", "capability") / "metrics.json", {"slices": slices})
    texts = ("sign", "verdict", "metric", "threshold", "cause", "first_fix")
    finding = dict.fromkeys(texts, evil) | {
        "update": 2,
        "value": 1.0,
    }
    finding_on_a_curve = finding | {"metric": "kl"}
    write_json(stage_dir("r0", "ppo") / "health.json", {"findings": [finding, finding_on_a_curve]})
    sample = dict.fromkeys(("id", "base", "sft", "champion", "ppo"), evil) | {
        "sample": 0,
        "prompt": [{"role": "user", "content": evil}],
    }
    sample |= {
        f"{model}_{metric}": 0.25
        for model in ("base", "sft", "champion", "ppo")
        for metric in ("judge_score", "score")
    }
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", [sample])
    approval = {"approved": True, "by": evil, "reason": evil, "failed": {}}
    row = failed_check(evil, None, "> 0", name=evil, threshold=evil, fault=evil, next_step=evil)
    for gate, opened in (("sft", True), ("reward", False)):
        verdict = {
            "gate": gate,
            "round": "r0",
            "passed": False,
            "may_continue": opened,
            "policy": "ask",
            "approval": approval if opened else None,
            "checks": [row],
        }
        write_json(Path(f"reports/r0/gate_{gate}.json"), verdict)
    case = {
        "id": evil,
        "round": "r0",
        "cause": "no_eos",
        "origin": 4,
        "prompt_id": "p",
        "prompt": evil,
        "response": evil,
        "better": evil,
    }
    case |= {"score": 1.5, "sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0, "tries": []}
    write_jsonl(ledger_path("r0"), [Badcase.model_validate(case).model_dump(mode="json")])
    text = page.write(["r0"], all_ran("r0")).read_text()
    html = Page(text)
    assert html.open_tags == [] and html.fetched == []
    without_library = text.replace(charts.library(), "").lower()
    assert "<script>alert" not in without_library and "<img" not in without_library
    assert "</script" not in charts.library() and "<!--" not in charts.library()
    assert html.words.count(evil) >= 10  # samples, badcases, gates' numbers
    drawn = json.loads(html.chart_data)  # as the page's script reads it
    labels = {row.get("label") for spec in drawn["specs"] for row in spec["data"]["values"]}
    assert {repr(evil), evil} <= labels
    assert f"{evil}: {evil}, update 2" in json.dumps(drawn["specs"], ensure_ascii=False).replace(
        "\\\\", "\\"
    )
    assert any(f"approved by {evil}: {evil}" in word for word in html.words)
