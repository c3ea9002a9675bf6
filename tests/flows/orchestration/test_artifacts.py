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
from prefect import flow
from prefect.artifacts import MarkdownArtifact, ProgressArtifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import Artifact

from flows.orchestration import artifacts
from flows.orchestration.artifacts import RunArtifacts
from flows.report.line_charts import Curve, lines
from stages.lib.core.files import stage_dir, work_dir, write_json, write_text
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


def write_curves(stage: str, *values: dict[str, float]) -> None:
    rows = [{"step": step, **row} for step, row in enumerate(values, 1)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_text(Path("rounds/r0", stage, "metrics.jsonl"), text)


def bars_of(stage_artifacts: RunArtifacts, *lines: str) -> list[tuple[float, str]]:
    """Progress and description after each line."""
    updates = [update for line in lines for update in stage_artifacts.updates(line)]
    assert {update.key for update in updates} == {"progress"}
    return [
        (update.progress, update.description or "")
        for update in updates
        if isinstance(update, ProgressArtifact)
    ]


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each line of a stage updates its progress."""
    monkeypatch.setattr(artifacts, "PROGRESS_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("every_line")
def test_the_progress_of_a_stage_has_its_newest_metrics_their_curves_and_findings() -> None:
    curve = [{"score_mean": 0.1 * step, "kl": 2.0 - step, "other": 1.0} for step in range(5)]
    write_curves("ppo", *curve)
    stage_artifacts = RunArtifacts("ppo@r0", print)
    first, other, last = bars_of(
        stage_artifacts,
        "[ppo@r0] step 5/20  eta 3:05  score_mean 0.1  kl 2",
        "[ppo@r0] training 1/4 batches  eta 0:10  loss <b>",
        f"[ppo@r0] step 6/20  eta 3:00  {FINDING}",
    )
    assert first[0] == other[0] == 25.0
    assert first[1].splitlines() == [
        "ppo@r0: step 5 of 20, 3:05 until the last step",
        "",
        "|  | step 3 | step 4 | step 5 | all steps |",
        "| --- | --- | --- | --- | --- |",
        "| reward | 0.2 | 0.3 | 0.4 | ▁▃▅▆█ |",
        "| KL from SFT, nats | 0 | -1 | -2 | █▆▅▃▁ |",
    ]
    assert other[1].splitlines()[:3] == [
        "ppo@r0: step 5 of 20, 3:05 until the last step",
        "",
        "now: training 1 of 4 batches, 0:10 until the end of this part (loss &lt;b&gt;)",
    ]
    assert last[1].splitlines()[-1].startswith("- update 6: danger: length hack")
    assert "&lt;pays&gt;" in last[1] and "now:" not in last[1]
    assert list(stage_artifacts.updates("some library's warning: step 5/20")) == []


def test_a_long_curve_ends_with_the_newest_value_and_skips_what_is_no_number() -> None:
    values = [float(step) for step in range(100)]
    line = artifacts.sparkline([*values, float("nan"), 0.0])
    assert len(line) <= 24 and line[-1] == "▁" and line[-2] == "█"
    assert artifacts.sparkline([2.0, 2.0]) == "▁▁" and artifacts.sparkline([]) == ""


def test_the_bar_is_updated_at_intervals_and_at_the_last_step() -> None:
    stage_artifacts = RunArtifacts("sft@r0", print)
    lines = [f"[sft@r0] step {step}/3  eta 0:00  loss 2" for step in (1, 2, 3)]
    progress = [progress for progress, _ in bars_of(stage_artifacts, *lines)]
    assert progress == [pytest.approx(100 / 3), 100.0]


@pytest.mark.usefixtures("every_line")
def test_before_the_first_step_the_bar_is_that_of_the_part_that_runs() -> None:
    lines = (
        "[sft@r0] loading a/b  for 0:20  base model",
        "[sft@r0] gradients 0/8 parts  eta ?",
        "[sft@r0] sampling 20/80 tokens  eta 0:30  base model",
    )
    assert bars_of(RunArtifacts("sft@r0", print), *lines) == [
        (0.0, "sft@r0: loading a/b, for 0:20 (base model)"),  # claims no time left
        (0.0, "sft@r0: gradients 0 of 8 parts"),
        (
            25.0,
            "sft@r0: sampling 20 of 80 tokens, 0:30 until the end of this part (base model)",
        ),
    ]


def run_of(work: list[tuple[str, list[str], str]]) -> object:
    """A flow run with stages: address, lines and outcome of each."""

    @flow
    def of_stages() -> None:
        for address, output, outcome in work:
            stage_artifacts = RunArtifacts(address, pytest.fail)
            for line in output:
                stage_artifacts.line(line)
            stage_artifacts.end(outcome)

    return of_stages(return_state=True).state_details.flow_run_id


def artifacts_of(prefect: SyncPrefectClient, run: object) -> dict[str, list[Artifact]]:
    """The artifacts of a flow run by key."""
    by_key: dict[str, list[Artifact]] = {}
    for artifact in prefect.read_artifacts(limit=200):
        if artifact.flow_run_id == run:
            by_key.setdefault(str(artifact.key), []).append(artifact)
    return by_key


@pytest.mark.usefixtures("every_line")
def test_a_stage_that_ended_has_one_card_and_no_progress(prefect: SyncPrefectClient) -> None:
    """Also one that runs a second time, after *Retry*."""
    write_curves("sft", {"loss": 2.0})
    write_json(Path("rounds/r0/sft/metrics.json"), {"loss_after": 1.234567, "note": ["<b>"]})
    sample = {"id": "1", "prompt": "The film", "base": "a <i>", "sft": "b", "outcome": None}
    write_text(Path("rounds/r0/sft/samples.jsonl"), json.dumps(sample) + "\n")
    lines = ["[sft@r0] sampling 20/80 tokens  eta 0:30", "[sft@r0] step 1/2  eta 0:30"]
    stages = [("sft@r0", lines, "unchanged"), ("sft@r0", lines, "unchanged")]
    run = run_of([*stages, ("ppo@r0", ["[ppo@r0] step 1/2  eta 0:30"], "failed")])
    by_key = artifacts_of(prefect, run)
    assert list(by_key) == ["sft-r0"]
    [card] = by_key["sft-r0"]
    assert card.description == "sft@r0: results"
    assert "| loss_after | 1.23 |" in str(card.data) and "| note | \\['&lt;b&gt;'\\] |" in str(
        card.data
    )
    assert re.search(r"prompt +base model +SFT +outcome", str(card.data))
    assert re.search(r"The film +a <i> +b +-", str(card.data))  # code, in which nothing is rendered


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


def test_the_newest_responses_are_those_of_the_last_appended_update(
    rollout_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "RESPONSES_SECONDS", 0.0)
    rollout_log.write_bytes(gzip_member(1, "old") + gzip_member(2, "```\n<b>new</b>"))
    stage_artifacts = RunArtifacts("ppo@r0", print)
    [card] = [
        artifact
        for artifact in stage_artifacts.updates("[ppo@r0] step 2/20  eta 1:00")
        if isinstance(artifact, MarkdownArtifact)
    ]
    assert card.key == "responses" and card.description == "ppo@r0: newest responses"
    title, _, block = card.markdown.partition("\n\n")
    assert title == "**Responses at update 2**" and "old" not in block
    assert block.startswith("````text\n") and block.endswith("\n````")
    assert re.search(r"The +``` ↵ <b>new</b> +0.5 +0.25 +1\n", block)
    assert stage_artifacts.newest_responses() == []  # nothing new
    third = gzip_member(3, "newest")
    rollout_log.write_bytes(rollout_log.read_bytes() + third[:10])
    assert stage_artifacts.newest_responses() == []  # half written
    rollout_log.write_bytes(rollout_log.read_bytes()[:-10] + third)
    assert [row["response"] for row in stage_artifacts.newest_responses()] == ["newest"]


def test_an_artifact_that_cannot_be_shown_is_logged_once_and_stops_nothing(
    rollout_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "RESPONSES_SECONDS", 0.0)
    rollout_log.write_bytes(b"no gzip")
    lines: list[str] = []
    stage_artifacts = RunArtifacts("ppo@r0", lines.append)
    stage_artifacts.progress_due = float("inf")
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
    shown = RunArtifacts("ppo@r0", print).pictures()
    assert [text.count("data:image/svg+xml") for text in shown] == [1, 1]
    assert RunArtifacts("sft@r0", print).pictures() == []


def test_the_policys_responses_are_shown_every_20_seconds(
    rollout_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(artifacts, "time", clock)
    stage_artifacts = RunArtifacts("ppo@r0", print)
    shown_at = []
    for seconds in range(1, 46):
        clock.now = 1000.0 + seconds
        with rollout_log.open("ab") as file:
            file.write(gzip_member(seconds, "end"))
        updates = list(stage_artifacts.updates(f"[ppo@r0] step {seconds}/90  eta 1:00"))
        shown_at += [seconds for update in updates if isinstance(update, MarkdownArtifact)]
    assert shown_at == [20, 40]
