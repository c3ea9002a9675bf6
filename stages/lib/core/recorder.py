"""A stage's metrics, progress lines and manifest."""

import csv
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.lib.core.files import (
    file_hash,
    read_json,
    read_jsonl,
    stage_dir,
    work_dir,
    write_json,
    write_jsonl,
)
from stages.lib.core.progress import STEP, minutes, print_line
from stages.lib.core.types import Metrics, StepMetrics

NOT_MEASURED = "not_measured"
"""Key of a metrics.json without numbers: why its stage had nothing to train or to measure."""


def write_manifest(
    stage: str, round_: str, *, seed: int, inputs: Iterable[Path], **facts: Any
) -> None:
    """Write manifest.json, which records what the outputs of a stage were made from.

    Args:
        stage: the stage's name.
        round_: the round, e.g. `r0`.
        seed: the seed of the run.
        inputs: files and folders that the stage read; recorded with their sha256.
        facts: further entries, e.g. template_hash or the reward model's calibration.
    """
    packages = ("torch", "transformers", "trl", "peft", "datasets")
    write_json(
        stage_dir(round_, stage) / "manifest.json",
        {
            "stage": stage,
            "round": round_,
            "seed": seed,
            "inputs": {str(path): file_hash(path) for path in inputs},
            "versions": {name: version(name) for name in packages},
            **facts,
        },
    )


def read_metrics(round_: str, stage: str) -> Metrics:
    """A stage's metrics.json.

    Raises:
        BadInput: the stage has not run.
    """
    path = stage_dir(round_, stage) / "metrics.json"
    metrics: Metrics = read_json(path)
    return metrics


class MetricLogger:
    """Writes a stage's metrics to files and its progress to stdout.

    `rounds/<round>/<stage>/metrics.jsonl` has one line per step. It must be the same in every run,
    so times are in a file of their own: `.rondo/work/<round>/<stage>/clock.jsonl` has a first line
    with step -1 for the start, then one line per line of metrics.jsonl with the `time` (seconds
    since the epoch) at which it was written.

    Args:
        stage: the stage's name, e.g. `sft`.
        round_: the round, e.g. `r0`.
        total_steps: how many steps the stage will log, for the ETA; 0 if unknown.
        logged_steps: the steps that a run logged before it was interrupted, if this run resumes it.
        writes: whether this process writes the files; several that share a stage have the same
            steps.

    Example:
        recorder = MetricLogger("sft", "r0", total_steps=2)
        recorder.log(1, {"loss": 2.0}, show=["loss"])  # [sft@r0] step 1/2  eta 0:03  loss 2
        recorder.log(2, {"loss": 1.5, "kl": 0.5})      # only to the files
        recorder.finish({"loss_after": 1.5})           # metrics.json and curves.csv
    """

    def __init__(
        self,
        stage: str,
        round_: str,
        total_steps: int = 0,
        logged_steps: Sequence[StepMetrics] = (),
        writes: bool = True,
    ) -> None:
        self.folder, self.work = stage_dir(round_, stage), work_dir(round_, stage)
        self.round, self.label = round_, f"{stage}@{round_}"
        self.total_steps = total_steps
        self.started = time.monotonic()  # no clock that somebody sets
        self.steps, self.resumed_steps = list(logged_steps), len(logged_steps)
        self.writes = writes
        if writes:
            self._open(logged_steps)

    def _open(self, logged_steps: Sequence[StepMetrics]) -> None:
        """Start the files, or continue those of an interrupted run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        # The interrupted run may have logged steps after the state that this run resumes from.
        write_jsonl(self.folder / "metrics.jsonl", self.steps)
        clock = self.work / "clock.jsonl"
        times = (
            read_jsonl(clock, f"rm -r {self.work}")
            if logged_steps and clock.exists()
            else [{"step": -1, "time": time.time()}]
        )
        write_jsonl(clock, times[: len(logged_steps) + 1])

    def log(self, step: int, metrics: Mapping[str, float], show: Iterable[str] = ()) -> None:
        """Append one step to the files.

        Args:
            step: number of the step.
            metrics: numbers by name.
            show: names of the metrics in the progress line; without any, none is printed.

        Raises:
            KeyError: `show` names a metric that is not in `metrics`.
        """
        row = {"step": step, **metrics}
        self.steps.append(row)
        files = (
            (self.folder / "metrics.jsonl", row),
            (self.work / "clock.jsonl", {"step": step, "time": time.time()}),
        )
        for path, line in files if self.writes else ():
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        if shown := "  ".join(f"{name} {metrics[name]:.4g}" for name in show):
            self.log_progress(step, shown)

    def log_progress(self, step: int, text: str) -> None:
        """Print a progress line: stage, step, ETA (minutes:seconds), text."""
        steps_run = step - self.resumed_steps
        eta = (
            (time.monotonic() - self.started) / steps_run * (self.total_steps - step)
            # not above 0: a step from before the resume is shown again, e.g. an engine's policy
            if steps_run > 0 and self.total_steps
            else 0.0
        )
        print_line(
            f"[{self.label}] {STEP} {step}/{self.total_steps or '?'}  eta {minutes(eta)}  {text}"
        )

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Write the final metrics to metrics.json, and all steps to curves.csv for `dvc plots`."""
        write_json(self.folder / "metrics.json", dict(metrics))
        columns = sorted({name for row in self.steps for name in row} - {"step"})
        with (self.folder / "curves.csv").open("w", newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, ["step", *columns], restval="")
            table.writeheader()
            table.writerows(self.steps)
