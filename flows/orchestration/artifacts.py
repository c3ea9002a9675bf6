"""Prefect artifacts of a stage: while it runs, its progress with the newest metrics, and PPO's
newest responses; at its end one card with pictures, samples and metrics, or a gate's verdict.
"""

import base64
import gzip
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.artifacts import MarkdownArtifact, ProgressArtifact

from flows.core import addresses, tables
from flows.core.bookkeeping import bookkeeping
from flows.core.services import LogLine
from flows.execution import dvc_stages
from flows.orchestration import cards, stage_card
from flows.report import charts
from flows.report.charts import Chart
from flows.report.pictures import PICTURES
from flows.report.round_data import read_round
from flows.tracking.records import UNFINISHED
from stages.lib.core.files import stage_dir, work_dir
from stages.lib.core.params import load_params
from stages.lib.core.progress import PROGRESS, STEP, UNKNOWN
from stages.lib.core.rows import RolloutRow, StepRow, read_rows

Artifact = ProgressArtifact | MarkdownArtifact
RUNNING, RESPONSES = "progress", "responses"  # keys of what the page shows of the running stage
FINDING = re.compile(r"(warn|danger): ")
PROGRESS_SECONDS, RESPONSES_SECONDS = 5.0, 20.0  # between two updates of an artifact
PAUSE_SECONDS = 60.0  # after an error
CURVES = {  # of metrics.jsonl, with their names on the page
    "loss": "loss",
    "score_mean": "reward",
    "judge_score_mean": "judge score",
    "kl": "KL from SFT, nats",
    "response_length": "response length, tokens",
}
SHOWN_STEPS, SPARKS = 3, "▁▂▃▄▅▆▇█"
MAX_SPARKS, SHOWN_FINDINGS = 24, 3


class RunArtifacts:
    """The artifacts of one stage on the page of its run.

    `line` and `end` never raise: an artifact that cannot be shown must not stop the stage. The
    error is logged, and nothing more is sent for PAUSE_SECONDS.
    """

    def __init__(self, address: str, log: LogLine) -> None:
        self.address, self.log = address, log
        self.stage, self.round = addresses.split_address(address)
        self.key = addresses.slug(address)
        self.step: re.Match[str] | None = None  # the last line of each kind
        self.findings: list[str] = []
        self.responses = ""  # the last ones that were shown
        self.bytes_read: dict[Path, int] = {}  # of each file of rollouts
        # Times of time.monotonic()
        self.progress_due = 0.0
        self.responses_due = time.monotonic() + RESPONSES_SECONDS
        self.paused_until = 0.0

    def line(self, text: str) -> None:
        """Update the page after the stage printed this line."""
        if time.monotonic() >= self.paused_until:
            with self._errors_ignored():
                for artifact in self.updates(text):
                    cards.show(artifact)

    def end(self, outcome: str) -> None:
        """Show the results of the stage at its end, in place of its progress.

        A failed gate shows its verdict, another failed or cancelled stage nothing. Charts are
        drawn only of a stage that ran.
        """
        with self._errors_ignored():
            cards.remove(RUNNING, RESPONSES)
            parts: list[str] = []
            is_gate, succeeded = self.stage.startswith("gate_"), outcome not in UNFINISHED
            if outcome == dvc_stages.Outcome.ran.value:
                parts += self.pictures()
            if succeeded and self.findings:
                parts.append("\n".join(["**Health**", "", *self.findings]))
            if succeeded and self.responses:
                parts.append(self.responses)
            if succeeded or is_gate:
                parts += stage_card.results(self.stage, self.round)
            if parts:
                description = f"{self.address}: {'verdict' if is_gate else 'results'}"
                markdown = "\n\n".join(parts)
                cards.show(
                    MarkdownArtifact(key=self.key, markdown=markdown, description=description)
                )

    def updates(self, line: str) -> Iterator[Artifact]:
        """The artifacts that change with a line of the stage's output."""
        match = PROGRESS.match(line)
        if not match:
            return
        details, is_step = match["details"] or "", match["what"] == STEP
        if is_step:
            self.step = match
        if is_step and FINDING.match(details):
            self.findings.append(f"- update {match['done']}: {stage_card.escaped(details)}")
        is_last = bool(match["total"]) and match["done"] == match["total"]
        if time.monotonic() >= self.progress_due or (is_step and is_last):
            self.progress_due = time.monotonic() + PROGRESS_SECONDS
            yield self.progress(match)
        if time.monotonic() >= self.responses_due:
            self.responses_due = time.monotonic() + RESPONSES_SECONDS
            if responses := self.newest_responses():
                title = f"**Responses at update {responses[0]['update']}**"
                self.responses = f"{title}\n\n{stage_card.responses(responses)}"
                yield MarkdownArtifact(
                    key=RESPONSES,
                    markdown=self.responses,
                    description=f"{self.address}: newest responses",
                )

    def progress(self, last: re.Match[str]) -> ProgressArtifact:
        """How far the stage is: the bar of its steps, or before the first one that of its pass."""
        bar = self.step or last
        done, total = int(bar["done"] or 0), int(bar["total"] or 0)
        parts = [f"{self.address}: {describe_progress(bar)}"]
        if self.step and last["what"] != STEP:
            parts.append(f"now: {describe_progress(last)}")
        parts += [self.newest_metrics()] if self.step else []
        parts.append("\n".join(self.findings[-SHOWN_FINDINGS:]))
        return ProgressArtifact(
            key=RUNNING,
            progress=100 * done / total if total else 0.0,
            description="\n\n".join(filter(None, parts)),
        )

    def newest_metrics(self) -> str:
        """A table of the last steps with a line of all steps so far; empty if there are none."""
        path = stage_dir(self.round, self.stage) / "metrics.jsonl"
        command = f"dvc repro -f {self.address}"
        rows = read_rows(StepRow, path, command, growing=True) if path.exists() else []
        return curves_table(rows)

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
        return [row for row in rows if row["update"] == rows[-1]["update"]][: stage_card.SHOWN]

    def pictures(self) -> list[str]:
        """The charts of the report that belong to the stage, in Markdown."""
        if self.stage not in PICTURES:
            return []
        of_round = (read_round(self.round, {self.address: {}}), load_params())
        return [picture_markdown(chart) for chart in PICTURES[self.stage]([of_round])]

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
        end = "the last step" if match["what"] == STEP else "the end of this part"
        left = f", {match['eta']} until {end}" if match["eta"] != UNKNOWN else ""
        text = f"{match['what']} {match['done']} of {match['total']}{unit}{left}"
    else:
        text = f"{match['what']}, for {match['elapsed']}"
    # the details of a step are its metrics, those of a pass the passes around it
    around = match["details"] if match["what"] != STEP else None
    return stage_card.escaped(f"{text} ({around})" if around else text)


def curves_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The CURVES of the last steps, and a line of all steps; empty without any."""
    names = {
        name: [row[name] for row in rows if isinstance(row.get(name), int | float)]
        for name in CURVES
    }
    last = rows[-SHOWN_STEPS:]
    header = ["", *(f"step {row['step']}" for row in last), "all steps"]
    body = [
        [
            CURVES[name],
            *(stage_card.shown(row.get(name)) for row in last),
            sparkline(values),
        ]
        for name, values in names.items()
        if values
    ]
    return tables.markdown_table(header, body) if body else ""


def sparkline(values: Sequence[float]) -> str:
    """A line of bars, from the lowest to the highest value.

    >>> sparkline([0.0, 7.0, 3.0])
    '▁█▄'
    """
    numbers = [value for value in values if math.isfinite(value)]
    every = math.ceil(len(numbers) / MAX_SPARKS) or 1
    lowest, highest = min(numbers, default=0.0), max(numbers, default=0.0)
    scale = (len(SPARKS) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(SPARKS[round((value - lowest) * scale)] for value in numbers[::-every][::-1])


def picture_markdown(chart: Chart) -> str:
    """A chart of the report as an image in Markdown."""
    data = base64.b64encode(charts.svg(chart).encode()).decode()
    return f"![](data:image/svg+xml;base64,{data})"
