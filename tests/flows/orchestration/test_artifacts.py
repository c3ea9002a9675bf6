"""What Prefect's pages are told: from lines and files as stages leave them, and by a real run into
Prefect's database.
"""

import base64
import gzip
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.artifacts import MarkdownArtifact, ProgressArtifact, TableArtifact

from flows.orchestration import artifacts
from flows.orchestration.artifacts import RunArtifacts
from tests.paths import ROOT
from tests.servers import free_port

FINDING = "danger: length hack: response_length, last / first 1.7, healthy 1.3 or less. It <pays> for it. First: ppo.length_penalty"


def test_a_line_moves_the_bar_and_findings_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "BAR_SECONDS", 0.0)
    shown = RunArtifacts("ppo@r0", print)
    (bar,) = shown.news("[ppo@r0] step 5/20  eta 3:05  score_mean 0.1  kl 2")
    assert isinstance(bar, ProgressArtifact)
    assert (bar.key, bar.progress, bar.description) == (
        "progress-ppo-r0",
        25.0,
        "ppo@r0: step 5 of 20, 3:05 left",
    )
    assert list(shown.news("some library's warning: step 5/20")) == []
    shown.findings.append("- update 4: warn: before")
    _, health = shown.news(f"[ppo@r0] step 6/20  eta 3:00  {FINDING}")
    assert isinstance(health, MarkdownArtifact) and health.key == "health-ppo-r0"
    assert health.markdown.splitlines()[0] == "- update 4: warn: before"
    assert (
        health.markdown.splitlines()[1].startswith("- update 6: danger: length hack")
        and "&lt;pays&gt;" in health.markdown
    )


def test_bars_are_not_redrawn_for_every_step_but_for_the_last() -> None:
    shown = RunArtifacts("sft@r0", print)
    drawn = [
        bar for step in (1, 2, 3) for bar in shown.news(f"[sft@r0] step {step}/3  eta 0:00  loss 2")
    ]
    assert [bar.progress for bar in drawn if isinstance(bar, ProgressArtifact)] == [
        pytest.approx(100 / 3),
        100.0,
    ]


def test_the_newest_answers_are_those_of_the_last_update_that_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(artifacts, "ANSWER_SECONDS", 0.0)
    log = Path(".rondo/work/r0/ppo/rollouts/00001.jsonl.gz")
    log.parent.mkdir(parents=True)

    def member(update: int, response: str) -> bytes:
        row = {
            "update": update,
            "prompt": "The",
            "response": response,
            "score": 0.5,
            "judge": 0.25,
            "kl": 1.0,
            "id": "x",
        }
        return gzip.compress((json.dumps(row) + "\n").encode())

    log.write_bytes(member(1, "old") + member(2, "<b>new</b>"))
    shown = RunArtifacts("ppo@r0", print)
    tables = [
        each
        for each in shown.news("[ppo@r0] step 2/20  eta 1:00")
        if isinstance(each, TableArtifact)
    ]
    (row,) = tables[0].table
    assert row == {
        "prompt": "The",
        "response": "&lt;b&gt;new&lt;/b&gt;",
        "score": 0.5,
        "judge": 0.25,
        "kl": 1.0,
    }
    assert tables[0].description == "Answers of ppo@r0 at update 2"
    assert shown.newest_answers() == []  # nothing since
    third = member(3, "newest")
    log.write_bytes(log.read_bytes() + third[:10])
    assert shown.newest_answers() == []  # half written
    log.write_bytes(log.read_bytes()[:-10] + third)
    assert [answer["response"] for answer in shown.newest_answers()] == ["newest"]


def test_what_a_model_wrote_is_text() -> None:
    turns = [{"role": "user", "content": "<script>alert(1)</script>"}]
    (row,) = artifacts.table(
        [
            {
                "prompt": turns,
                "sft": "<img src=x onerror=alert(1)>" + "x" * 1000,
                "score": 0.5,
                "said": None,
            }
        ]
    )
    assert "<" not in row["prompt"] and "alert(1)" in row["prompt"]
    assert row["sft"].startswith("&lt;img") and len(row["sft"]) == artifacts.SHOWN_CHARACTERS + len(
        "&lt;&gt;"
    ) - len("<>")
    assert (row["score"], row["said"]) == (0.5, "None")


def test_a_run_leaves_its_pages_in_prefect(project: Path) -> None:
    """By itself, with a server of its own for as long as it takes.."""
    environment = {
        **os.environ,
        "PREFECT_SERVER_API_PORT": free_port(),
        "MLFLOW_PORT": free_port(),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with sqlite3.connect(project / ".rondo/prefect/prefect.db") as database:
        found = {
            key: (type_, json.loads(str(data)))
            for key, type_, data in database.execute("select key, type, data from artifact")
        }
    assert found["progress-sft-r0"] == ("progress", 100.0)
    assert {"metric": "loss_before", "value": 5.17} in json.loads(found["sft-r0"][1])
    (sample,) = json.loads(found["samples-sft-r0"][1])
    assert sample == {"id": "1", "prompt": "Human: Hi\n\nAssistant:", "base": "a", "sft": "b"}
    assert found["gate-sft-r0"][1].startswith("passed")
    link = re.search(r"\((\S+)\)", found["mlflow"][1])
    run, query = link[1].split("?") if link else ("", "")
    assert (
        re.search(r"/#/experiments/\d+/runs/\w+$", run) and query == "workflowType=machine_learning"
    )
    assert f"{run}/artifacts/report.html?{query}" in found["report"][1]


def test_a_page_that_cannot_be_shown_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = Path(".rondo/work/r0/ppo/rollouts/00001.jsonl.gz")
    log.parent.mkdir(parents=True)
    log.write_bytes(b"no gzip")
    monkeypatch.setattr(artifacts, "ANSWER_SECONDS", 0.0)
    said: list[str] = []
    shown = RunArtifacts("ppo@r0", said.append)
    shown.bar_due = float("inf")
    for step in (1, 2):
        shown.line(f"[ppo@r0] step {step}/20  eta 1:00")
    assert len(said) == 1 and "ppo@r0 is not shown in Prefect for now (BadGzipFile" in said[0]


def test_a_picture_stands_by_itself() -> None:
    drawn = artifacts.charts.lines(
        "Reward & judge",
        {"a": ([1, 2], [3, 4])},
        "update",
        "nats",
        artifacts.charts.Marks({"budget": 3.5}),
    )
    data = re.fullmatch(r"!\[\]\(data:image/svg\+xml;base64,(\S+)\)", artifacts.picture(drawn))
    assert data
    svg = base64.b64decode(data[1]).decode()
    assert svg.startswith("<svg ") and "var(--" not in svg and "#2a6fb0" in svg
