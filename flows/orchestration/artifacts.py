"""Prefect artifacts of a stage: a progress bar, PPO's health and newest responses while it runs;
metrics, samples, pictures or the gate's verdict at its end.
"""

import base64
import gzip
import html
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    MarkdownArtifact,
    ProgressArtifact,
    TableArtifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.core import addresses, tables, verdicts
from flows.core.bookkeeping import bookkeeping
from flows.core.services import LogLine
from flows.execution import dvc_stages
from flows.report import charts, diagnosis, round_files
from flows.report.charts import Chart
from flows.report.pictures import PICTURES
from flows.report.round_data import extreme_samples, read_round
from flows.tracking.records import UNFINISHED
from stages.lib.core.files import read_jsonl, stage_dir, work_dir
from stages.lib.core.params import flatten, load_params
from stages.lib.core.progress import PROGRESS, STEP, UNKNOWN
from stages.lib.core.rows import EvaluationSample, RolloutRow, read_rows
from stages.lib.data.prompts import transcript

Artifact = ProgressArtifact | MarkdownArtifact | TableArtifact
FINDING = re.compile(r"(warn|danger): ")
PROGRESS_SECONDS, RESPONSES_SECONDS = 2.0, 20.0  # between two updates of an artifact
PAUSE_SECONDS = 60.0  # after an error
SHOWN, SHOWN_CHARACTERS = 8, 400  # samples of a stage, and characters of a text
ROLLOUT_COLUMNS = ("prompt", "response", "score", "judge_score", "kl")


class RunArtifacts:
    """The artifacts of one stage on the page of its run.

    `line` and `end` never raise: an artifact that cannot be shown must not stop the stage. The
    error is logged, and nothing more is sent for PAUSE_SECONDS.
    """

    def __init__(self, address: str, log: LogLine) -> None:
        self.address, self.log = address, log
        self.stage, self.round = addresses.split_address(address)
        self.key = addresses.slug(address)
        self.bars: dict[str, UUID] = {}  # progress artifacts by key
        self.findings: list[str] = []
        self.bytes_read: dict[Path, int] = {}  # of each file of rollouts
        # Times of time.monotonic()
        self.bars_due: dict[str, float] = {}
        self.responses_due = time.monotonic() + RESPONSES_SECONDS
        self.paused_until = 0.0

    def line(self, text: str) -> None:
        """Update the page after the stage printed this line."""
        if time.monotonic() >= self.paused_until:
            with self._errors_ignored():
                for artifact in self.updates(text):
                    self._send(artifact)

    def end(self, outcome: str) -> None:
        """Show the results of the stage at its end.

        A failed gate shows its verdict, another failed or cancelled stage nothing. Charts are
        drawn only of a stage that ran.
        """
        with self._errors_ignored():
            succeeded = outcome not in UNFINISHED
            for bar in self.bars.values() if succeeded else ():
                update_progress_artifact(bar, 100.0, f"{self.address}: done")
            if succeeded or self.stage.startswith("gate_"):
                for artifact in self.results():
                    self._send(artifact)
            if outcome == dvc_stages.Outcome.ran.value:
                for artifact in self.pictures():
                    self._send(artifact)

    def updates(self, line: str) -> Iterator[Artifact]:
        """The artifacts that change with a line of the stage's output."""
        match = PROGRESS.match(line)
        if not match:
            return
        details = match["details"] or ""
        done, total = int(match["done"] or 0), int(match["total"] or 0)
        is_step = match["what"] == STEP
        # a pass has a bar of its own, since it ends within a step
        key = f"{'progress' if is_step else 'pass'}-{self.key}"
        if time.monotonic() >= self.bars_due.get(key, 0.0) or (total and done == total):
            self.bars_due[key] = time.monotonic() + PROGRESS_SECONDS
            yield ProgressArtifact(
                key=key,
                progress=100 * done / total if total else 0.0,
                description=f"{self.address}: {describe_progress(match)}",
            )
        if is_step and FINDING.match(details):
            self.findings.append(f"- update {done}: {html.escape(details, quote=False)}")
            yield MarkdownArtifact(
                key=f"health-{self.key}",
                markdown="\n".join(self.findings),
                description=f"Health of {self.address}",
            )
        if time.monotonic() >= self.responses_due:
            self.responses_due = time.monotonic() + RESPONSES_SECONDS
            if responses := self.newest_responses():
                yield TableArtifact(
                    key=f"answers-{self.key}",
                    table=table(responses, ROLLOUT_COLUMNS),
                    description=f"Responses of {self.address} at update {responses[0]['update']}",
                )

    def newest_responses(self) -> list[RolloutRow]:
        """Rollouts of the last update that was appended since the last call; empty if there is
        none. Only the appended part of the file is read.
        """
        # in the folder of this run's resume state; other folders are those of killed runs
        files = work_dir(self.round, self.stage).glob("*/rollouts/*.jsonl.gz")
        newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is None:
            return []
        with newest.open("rb") as stream:
            stream.seek(self.bytes_read.get(newest, 0))
            appended = stream.read()
            end = stream.tell()
        try:
            rows: list[RolloutRow] = [
                json.loads(line) for line in gzip.decompress(appended).splitlines()
            ]
        except EOFError:  # the stage is writing: the next call reads it
            return []
        self.bytes_read[newest] = end
        return [row for row in rows if row["update"] == rows[-1]["update"]][:SHOWN]

    def results(self) -> Iterator[Artifact]:
        """The verdict of a gate, or the metrics and samples of another stage."""
        if self.stage.startswith("gate_"):
            if verdict := verdicts.read_gate(self.round, self.stage.removeprefix("gate_")):
                yield MarkdownArtifact(
                    key=self.key,
                    markdown=gate_markdown(verdict),
                    description=f"Verdict of {self.address}",
                )
            return
        folder = stage_dir(self.round, self.stage)
        metrics = flatten(round_files.read_metrics(self.round, self.stage, {self.address: {}}))
        if rows := [{"metric": name, "value": value} for name, value in metrics]:
            yield TableArtifact(
                key=self.key, table=table(rows), description=f"Metrics of {self.address}"
            )
        if (path := folder / "samples.jsonl").exists():
            restore = round_files.restore(path)
            shown: Sequence[Mapping[str, object]]
            if self.stage == "evaluate":
                shown = extreme_samples(read_rows(EvaluationSample, path, restore))
            else:
                shown = read_jsonl(path, restore)[:SHOWN]
            yield TableArtifact(
                key=f"samples-{self.key}",
                table=table(shown),
                description=f"Samples of {self.address}",
            )

    def pictures(self) -> Iterator[Artifact]:
        """The charts of the report that belong to the stage."""
        draw = PICTURES.get(self.stage)
        if draw and (
            charts_of_stage := draw([(read_round(self.round, {self.address: {}}), load_params())])
        ):
            yield MarkdownArtifact(
                key=f"pictures-{self.key}",
                markdown="\n\n".join(picture_markdown(chart) for chart in charts_of_stage),
                description=f"Pictures of {self.address}",
            )

    def _send(self, artifact: Artifact) -> None:
        key, description = artifact.key, artifact.description
        if isinstance(artifact, MarkdownArtifact):
            create_markdown_artifact(artifact.markdown, key, description)
        elif isinstance(artifact, TableArtifact):
            create_table_artifact(artifact.table, key, description)
        elif bar := self.bars.get(key or ""):
            update_progress_artifact(bar, artifact.progress, description)
        else:
            created = create_progress_artifact(artifact.progress, key or "", description)
            self.bars[key or ""] = cast(UUID, created)

    @contextmanager
    def _errors_ignored(self) -> Iterator[None]:
        # Reset only without an error
        self.paused_until = time.monotonic() + PAUSE_SECONDS
        with bookkeeping(f"showing {self.address} in Prefect", self.log):
            yield
            self.paused_until = 0.0


def describe_progress(match: re.Match[str]) -> str:
    """What a line of PROGRESS says, as the description of a bar."""
    if match["total"]:
        unit = f" {match['unit']}" if match["unit"] else ""
        left = f", {match['eta']} left" if match["eta"] != UNKNOWN else ""
        text = f"{match['what']} {match['done']} of {match['total']}{unit}{left}"
    else:
        text = f"{match['what']}, for {match['elapsed']}"
    # the details of a step are its metrics, those of a pass the passes around it
    around = match["details"] if match["what"] != STEP else None
    return f"{text} ({around})" if around else text


def table(
    rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Rows for a Prefect table, with these columns or all.

    Prefect renders cells as HTML, so the texts of models are escaped.
    """
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    return [{name: cell(row.get(name, "")) for name in names} for row in rows]


def cell(value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        value = transcript(value).strip()
    return html.escape(str(value)[:SHOWN_CHARACTERS], quote=False)


def picture_markdown(chart: Chart) -> str:
    """A chart of the report as an image in Markdown."""
    data = base64.b64encode(charts.svg(chart).encode()).decode()
    return f"![](data:image/svg+xml;base64,{data})"


def gate_markdown(verdict: dict[str, Any]) -> str:
    """The outcome of a gate and a table of its checks."""
    header = ("metric", "value", "threshold", "passed", "next step")
    keys = ("metric", "value", "threshold", "passed", "next_step")
    checks = tables.markdown_table(
        header, ([check[key] for key in keys] for check in verdict["checks"])
    )
    return html.escape(f"{diagnosis.outcome(verdict)}\n\n{checks}", quote=False)
