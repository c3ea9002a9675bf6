"""What a run's page in Prefect shows of a stage: a bar, PPO's health and newest answers; at its end
numbers, samples, pictures, verdict.

A page that cannot be shown must not undo what a stage does: that is said, and for a minute nothing
more is tried.
"""

import base64
import gzip
import html
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from markupsafe import Markup
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
from flows.core.services import LogLine
from flows.execution import dvc_stages
from flows.report import charts, page, summary
from flows.report.round_data import extreme_samples, read_round
from flows.tracking.records import read_locks
from stages.lib.core.files import read_jsonl, stage_dir, work_dir
from stages.lib.core.params import flatten, load_params
from stages.lib.core.types import Row
from stages.lib.data.prompts import transcript

Artifact = ProgressArtifact | MarkdownArtifact | TableArtifact
PROGRESS = re.compile(
    r"\[\S+\] step (?P<step>\d+)/(?P<total>\d+)  eta (?P<eta>\d+:\d\d)(?:  (?P<said>.*))?$"
)
FINDING = re.compile(r"(warn|danger): ")
BAR_SECONDS, ANSWER_SECONDS, PAUSE_SECONDS = 2.0, 20.0, 60.0
SHOWN, SHOWN_CHARACTERS = 8, 400  # samples of a stage, and of each text
OF_AN_ANSWER = ("prompt", "response", "score", "judge", "kl")


class RunArtifacts:
    """One stage's part of the page."""

    def __init__(self, address: str, say: LogLine) -> None:
        self.address, self.say = address, say
        self.stage, self.round = addresses.split_address(address)
        self.key = addresses.slug(address)
        self.bar: UUID | None = None
        self.findings: list[str] = []
        self.read: dict[Path, int] = {}  # bytes of each file of rollouts
        self.bar_due, self.answers_due, self.silent_until = (
            0.0,
            time.monotonic() + ANSWER_SECONDS,
            0.0,
        )

    def line(self, text: str) -> None:
        """The stage has printed this."""
        if time.monotonic() >= self.silent_until:
            with self._kept_apart():
                for artifact in self.news(text):
                    self._show(artifact)

    def end(self, outcome: str) -> None:
        """The stage has ended, well or not; a gate that is shut has a verdict too. Nothing new is
        drawn of one that has not run.
        """
        with self._kept_apart():
            if outcome != "failed" and self.bar:
                update_progress_artifact(self.bar, 100.0, f"{self.address}: done")
            for artifact in (
                self.results() if outcome != "failed" or self.stage.startswith("gate_") else ()
            ):
                self._show(artifact)
            for artifact in self.pictures() if outcome == dvc_stages.Outcome.ran.value else ():
                self._show(artifact)

    def news(self, text: str) -> Iterator[Artifact]:
        """What a line of the stage's changes on the page."""
        found = PROGRESS.match(text)
        if not found:
            return
        step, total, said = int(found["step"]), int(found["total"]), found["said"] or ""
        if time.monotonic() >= self.bar_due or step == total:
            self.bar_due = time.monotonic() + BAR_SECONDS
            told = f"{self.address}: step {step} of {total}, {found['eta']} left"
            yield ProgressArtifact(
                key=f"progress-{self.key}", progress=100 * step / total, description=told
            )
        if FINDING.match(said):
            self.findings.append(f"- update {step}: {html.escape(said, quote=False)}")
            yield MarkdownArtifact(
                key=f"health-{self.key}",
                markdown="\n".join(self.findings),
                description=f"Health of {self.address}",
            )
        if time.monotonic() >= self.answers_due:
            self.answers_due = time.monotonic() + ANSWER_SECONDS
            if answers := self.newest_answers():
                told = f"Answers of {self.address} at update {answers[0]['update']}"
                yield TableArtifact(
                    key=f"answers-{self.key}", table=table(answers, OF_AN_ANSWER), description=told
                )

    def newest_answers(self) -> list[Row]:
        """Rollouts of the last update since they were last read; only what has been appended is
        read.
        """
        files = sorted((work_dir(self.round, self.stage) / "rollouts").glob("*.jsonl.gz"))
        if not files:
            return []
        with files[-1].open("rb") as stream:
            stream.seek(self.read.get(files[-1], 0))
            appended = stream.read()
            end = stream.tell()
        try:
            rows = [json.loads(line) for line in gzip.decompress(appended).splitlines()]
        except EOFError:  # the stage writes at this moment
            return []
        self.read[files[-1]] = end
        return [row for row in rows if row["update"] == rows[-1]["update"]][:SHOWN]

    def results(self) -> Iterator[Artifact]:
        """What the stage has left: a verdict, or numbers and samples."""
        if self.stage.startswith("gate_"):
            if verdict := verdicts.read_gate(self.round, self.stage.removeprefix("gate_")):
                yield MarkdownArtifact(
                    key=self.key,
                    markdown=gate_markdown(verdict),
                    description=f"Verdict of {self.address}",
                )
            return
        folder = stage_dir(self.round, self.stage)
        if numbers := [
            {"metric": name, "value": value}
            for name, value in flatten(summary.read_metrics(folder))
        ]:
            yield TableArtifact(
                key=self.key, table=numbers, description=f"Metrics of {self.address}"
            )
        if (path := folder / "samples.jsonl").exists():
            rows = read_jsonl(path, "")
            shown = extreme_samples(rows) if self.stage == "evaluate" else rows[:SHOWN]
            yield TableArtifact(
                key=f"samples-{self.key}",
                table=table(shown),
                description=f"Samples of {self.address}",
            )

    def pictures(self) -> Iterator[Artifact]:
        draw = page.PICTURES.get(self.stage)
        if draw and (drawn := draw(read_round(self.round, read_locks()), load_params())):
            shown = "\n\n".join(picture(each) for each in drawn)
            yield MarkdownArtifact(
                key=f"pictures-{self.key}",
                markdown=shown,
                description=f"Pictures of {self.address}",
            )

    def _show(self, artifact: Artifact) -> None:
        key, told = artifact.key, artifact.description
        if isinstance(artifact, MarkdownArtifact):
            create_markdown_artifact(artifact.markdown, key, told)
        elif isinstance(artifact, TableArtifact):
            create_table_artifact(artifact.table, key, told)
        elif self.bar:
            update_progress_artifact(self.bar, artifact.progress, told)
        else:
            self.bar = cast(UUID, create_progress_artifact(artifact.progress, key, told))

    @contextmanager
    def _kept_apart(self) -> Iterator[None]:
        self.silent_until = time.monotonic() + PAUSE_SECONDS
        with ignore_ui_errors(self.address, self.say):
            yield
            self.silent_until = 0.0


@contextmanager
def ignore_ui_errors(what: str, say: LogLine) -> Iterator[None]:
    """Around what only shows something."""
    try:
        yield
    except Exception as error:
        say(f"{what} is not shown in Prefect for now ({type(error).__name__}: {error})")


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> list[Row]:
    """For Prefect's tables, which take what a model wrote for HTML. columns: those wanted; none:
    all.
    """
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    return [{name: cell(row.get(name, "")) for name in names} for row in rows]


def cell(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        value = transcript(value).strip()
    return (
        value
        if isinstance(value, int | float)
        else html.escape(str(value)[:SHOWN_CHARACTERS], quote=False)
    )


def picture(drawn: Markup) -> str:
    """One of the report's, in Markdown."""
    data = base64.b64encode(charts.on_paper(drawn).encode()).decode()
    return f"![](data:image/svg+xml;base64,{data})"


def gate_markdown(verdict: dict[str, Any]) -> str:
    """How it ended, and its checks."""
    columns = ("metric", "value", "band", "passed", "next_step")
    checks = tables.markdown_table(
        columns, ([check[column] for column in columns] for check in verdict["checks"])
    )
    return f"{html.escape(summary.outcome(verdict), quote=False)}\n\n{checks}"
