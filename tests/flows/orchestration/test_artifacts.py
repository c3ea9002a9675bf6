"""Prefect artifacts, from lines and files in the format of stages. Those of a real run are checked
in test_up.py.
"""

import base64
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.artifacts import MarkdownArtifact, ProgressArtifact, TableArtifact

from flows.orchestration import artifacts
from flows.orchestration.artifacts import RunArtifacts
from flows.report.line_charts import Curve, lines
from stages.lib.core.files import stage_dir, work_dir, write_text
from stages.ppo.common.resume import Resume

FINDING = (
    "danger: length hack: response_length, last / first 1.7, healthy 1.3 or less. "
    "It <pays> for it. First: ppo.length_penalty"
)


@pytest.fixture
def rollout_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that PPO appends its responses to, before the first ones."""
    monkeypatch.chdir(tmp_path)
    log = Resume(work_dir("r0", "ppo"), {"seed": 0}).folder / "rollouts/00001.jsonl.gz"
    log.parent.mkdir(parents=True)
    return log


def test_a_line_moves_the_bar_and_findings_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "PROGRESS_SECONDS", 0.0)
    stage_artifacts = RunArtifacts("ppo@r0", print)
    (bar,) = stage_artifacts.updates("[ppo@r0] step 5/20  eta 3:05  score_mean 0.1  kl 2")
    assert isinstance(bar, ProgressArtifact)
    assert (bar.key, bar.progress, bar.description) == (
        "progress-ppo-r0",
        25.0,
        "ppo@r0: step 5 of 20, 3:05 left",
    )
    assert list(stage_artifacts.updates("some library's warning: step 5/20")) == []
    stage_artifacts.findings.append("- update 4: warn: before")
    _, health = stage_artifacts.updates(f"[ppo@r0] step 6/20  eta 3:00  {FINDING}")
    assert isinstance(health, MarkdownArtifact) and health.key == "health-ppo-r0"
    assert health.markdown.splitlines()[0] == "- update 4: warn: before"
    assert health.markdown.splitlines()[1].startswith("- update 6: danger: length hack")
    assert "&lt;pays&gt;" in health.markdown


def test_the_bar_is_updated_at_intervals_and_at_the_last_step() -> None:
    stage_artifacts = RunArtifacts("sft@r0", print)
    bars = [
        bar
        for step in (1, 2, 3)
        for bar in stage_artifacts.updates(f"[sft@r0] step {step}/3  eta 0:00  loss 2")
    ]
    progress = [bar.progress for bar in bars if isinstance(bar, ProgressArtifact)]
    assert progress == [pytest.approx(100 / 3), 100.0]


def test_a_pass_has_a_bar_of_its_own_that_says_what_is_done() -> None:
    stage_artifacts = RunArtifacts("sft@r0", print)
    lines = (
        "[sft@r0] sampling 20/80 tokens  eta 0:30  base model",
        "[sft@r0] sampling 80/80 tokens  eta 0:00  base model",
    )
    bars = [bar for line in lines for bar in stage_artifacts.updates(line)]
    assert [(bar.key, bar.progress, bar.description) for bar in bars] == [  # type: ignore[union-attr]
        ("pass-sft-r0", 25.0, "sft@r0: sampling 20 of 80 tokens, 0:30 left (base model)"),
        ("pass-sft-r0", 100.0, "sft@r0: sampling 80 of 80 tokens, 0:00 left (base model)"),
    ]
    (step,) = stage_artifacts.updates("[sft@r0] step 1/4  eta 0:30  loss 2")
    assert isinstance(step, ProgressArtifact)
    assert (step.key, step.description) == ("progress-sft-r0", "sft@r0: step 1 of 4, 0:30 left")


def test_a_bar_without_a_total_or_a_first_item_claims_no_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(artifacts, "PROGRESS_SECONDS", 0.0)
    stage_artifacts = RunArtifacts("sft@r0", print)
    lines = ("[sft@r0] loading a/b  for 0:20  base model", "[sft@r0] gradients 0/8 parts  eta ?")
    bars = [bar for line in lines for bar in stage_artifacts.updates(line)]
    assert [(bar.progress, bar.description) for bar in bars] == [  # type: ignore[union-attr]
        (0.0, "sft@r0: loading a/b, for 0:20 (base model)"),
        (0.0, "sft@r0: gradients 0 of 8 parts"),
    ]


def test_each_bar_is_one_artifact_that_is_updated_and_full_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        artifacts,
        "create_progress_artifact",
        lambda progress, key, text: sent.append(("new", key, progress)) or f"id of {key}",
    )
    monkeypatch.setattr(
        artifacts,
        "update_progress_artifact",
        lambda bar, progress, text: sent.append((bar, progress)),
    )
    monkeypatch.setattr(artifacts, "PROGRESS_SECONDS", 0.0)
    stage_artifacts = RunArtifacts("sft@r0", print)
    for line in ("sampling 20/80 tokens", "step 1/2", "sampling 40/80 tokens"):
        stage_artifacts.line(f"[sft@r0] {line}  eta 0:30")
    stage_artifacts.end("restored")
    bars = ("id of pass-sft-r0", "id of progress-sft-r0")
    assert sent == [
        ("new", "pass-sft-r0", 25.0),
        ("new", "progress-sft-r0", 50.0),
        (bars[0], 50.0),
        (bars[0], 100.0),
        (bars[1], 100.0),
    ]


def test_the_newest_responses_are_those_of_the_last_appended_update(
    rollout_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "RESPONSES_SECONDS", 0.0)

    def gzip_member(update: int, response: str) -> bytes:
        row = {
            "update": update,
            "prompt": "The",
            "response": response,
            "score": 0.5,
            "judge_score": 0.25,
            "kl": 1.0,
            "id": "x",
        }
        return gzip.compress((json.dumps(row) + "\n").encode())

    rollout_log.write_bytes(gzip_member(1, "old") + gzip_member(2, "<b>new</b>"))
    stage_artifacts = RunArtifacts("ppo@r0", print)
    tables = [
        artifact
        for artifact in stage_artifacts.updates("[ppo@r0] step 2/20  eta 1:00")
        if isinstance(artifact, TableArtifact)
    ]
    (row,) = tables[0].table
    assert row == {
        "prompt": "The",
        "response": "&lt;b&gt;new&lt;/b&gt;",
        "score": 0.5,
        "judge_score": 0.25,
        "kl": 1.0,
    }
    assert tables[0].description == "Responses of ppo@r0 at update 2"
    assert stage_artifacts.newest_responses() == []  # nothing new
    third = gzip_member(3, "newest")
    rollout_log.write_bytes(rollout_log.read_bytes() + third[:10])
    assert stage_artifacts.newest_responses() == []  # half written
    rollout_log.write_bytes(rollout_log.read_bytes()[:-10] + third)
    assert [row["response"] for row in stage_artifacts.newest_responses()] == ["newest"]


def test_texts_of_models_are_never_html() -> None:
    turns = [{"role": "user", "content": "<script>alert(1)</script>"}]
    response = "<img src=x onerror=alert(1)>" + "x" * 1000
    (row,) = artifacts.table([{"prompt": turns, "sft": response, "score": 0.5, "note": None}])
    assert "<" not in row["prompt"] and "alert(1)" in row["prompt"]
    assert row["sft"].startswith("&lt;img")
    assert len(row["sft"]) == artifacts.SHOWN_CHARACTERS + len("&lt;&gt;") - len("<>")
    assert (row["score"], row["note"]) == (0.5, "None")


def test_a_verdict_is_never_html() -> None:
    attack = "<img src=x onerror=alert(1)>"
    check = {"metric": attack, "value": 1.0, "threshold": 2.0, "passed": False, "next_step": attack}
    approval = {"approved": True, "by": attack, "reason": attack}
    verdict = {"passed": False, "may_continue": True, "checks": [check], "approval": approval}
    markdown = artifacts.gate_markdown(verdict)
    assert "<" not in markdown and markdown.count("onerror") >= 4


def test_an_artifact_that_cannot_be_shown_is_logged_once_and_stops_nothing(
    rollout_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "RESPONSES_SECONDS", 0.0)
    rollout_log.write_bytes(b"no gzip")
    lines: list[str] = []
    stage_artifacts = RunArtifacts("ppo@r0", lines.append)
    stage_artifacts.bars_due["progress-ppo-r0"] = float("inf")
    for step in (1, 2):
        stage_artifacts.line(f"[ppo@r0] step {step}/20  eta 1:00")
    assert len(lines) == 1 and "showing ppo@r0 in Prefect failed (BadGzipFile" in lines[0]


def test_a_picture_is_an_image_that_needs_no_style_of_its_page() -> None:
    curve = Curve("r0", "training", [1, 2], [3, 4])
    chart = lines("Reward & judge", [curve], ["r0"], ("update", "nats"))
    markdown = artifacts.picture_markdown(chart)
    data = re.fullmatch(r"!\[\]\(data:image/svg\+xml;base64,(\S+)\)", markdown)
    assert data
    svg = base64.b64decode(data[1]).decode()
    assert svg.startswith("<svg ") and "var(--" not in svg and "#2a6fb0" in svg


def test_a_stage_shows_its_charts(project: Path) -> None:
    write_text(stage_dir("r0", "ppo") / "curves.csv", "step,kl,entropy\n1,0,4\n2,1,3\n")
    [shown] = RunArtifacts("ppo@r0", print).pictures()
    assert isinstance(shown, MarkdownArtifact) and shown.key == "pictures-ppo-r0"
    assert shown.markdown.count("data:image/svg+xml") == 2
    assert list(RunArtifacts("sft@r0", print).pictures()) == []


def test_the_policys_responses_are_shown_every_20_seconds(
    rollout_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(artifacts, "time", clock)
    stage_artifacts = RunArtifacts("ppo@r0", print)
    shown_at = []
    for seconds in range(1, 46):
        clock.now = 1000.0 + seconds
        row = {"update": seconds, "prompt": "The", "response": "end"}
        with rollout_log.open("ab") as file:
            file.write(gzip.compress((json.dumps(row) + "\n").encode()))
        updates = list(stage_artifacts.updates(f"[ppo@r0] step {seconds}/90  eta 1:00"))
        shown_at += [seconds for update in updates if isinstance(update, TableArtifact)]
    assert shown_at == [20, 40]
