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
    read_jsonl,
    stage_dir,
    work_dir,
    write_json,
    write_jsonl,
)
from stages.lib.core.types import Row


def write_manifest(
    folder: Path, *, stage: str, round_: str, seed: int, inputs: Iterable[Path], **facts: Any
) -> None:
    """What made this folder: inputs by hash, versions, and the stage's own facts (template hash,
    calibration).
    """
    packages = ("torch", "transformers", "trl", "peft", "datasets")
    write_json(
        folder / "manifest.json",
        {
            "stage": stage,
            "round": round_,
            "seed": seed,
            "inputs": {str(path): file_hash(path) for path in inputs},
            "versions": {name: version(name) for name in packages},
            **facts,
        },
    )


class MetricLogger:
    """A stage's metrics: one line a step to metrics.jsonl, the wall clock beside it, progress to
    stdout.

    The clock file `.rondo/work/<round>/<stage>/clock.jsonl` has, line for line, the `time` (seconds
    since the epoch) at which each step of metrics.jsonl was written; a first line with step -1
    marks the start.
    """

    def __init__(
        self, stage: str, round_: str, total_steps: int = 0, done: Sequence[Row] = ()
    ) -> None:
        """`done`: the steps of a run that this one goes on from."""
        self.folder, self.work = stage_dir(round_, stage), work_dir(round_, stage)
        self.round, self.label = round_, f"{stage}@{round_}"
        self.total_steps, self.started = total_steps, time.time()
        self.steps, self.done = list(done), len(done)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        write_jsonl(self.folder / "metrics.jsonl", self.steps)
        clock = self.work / "clock.jsonl"
        times = (
            read_jsonl(clock, "")
            if done and clock.exists()
            else [{"step": -1, "time": self.started}]
        )
        write_jsonl(clock, times[: len(done) + 1])

    def log(self, step: int, metrics: Mapping[str, float], show: Iterable[str] = ()) -> None:
        """Append one step; `show` names the metrics of its progress line, which is not printed
        without them.
        """
        row = {"step": step, **metrics}
        self.steps.append(row)
        for path, line in (
            (self.folder / "metrics.jsonl", row),
            (self.work / "clock.jsonl", {"step": step, "time": time.time()}),
        ):
            with path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        if shown := "  ".join(f"{name} {metrics[name]:.4g}" for name in show):
            self.log_progress(step, shown)

    def log_progress(self, step: int, text: str) -> None:
        """A progress line: stage, step, ETA, text."""
        taken = step - self.done
        eta = (
            (time.time() - self.started) / taken * (self.total_steps - step)
            if taken and self.total_steps
            else 0.0
        )
        print(
            f"[{self.label}] step {step}/{self.total_steps or '?'}  eta {int(eta) // 60}:{int(eta) % 60:02d}  {text}",
            flush=True,
        )

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """The final numbers, and the steps once more as CSV for `dvc plots`."""
        write_json(self.folder / "metrics.json", dict(metrics))
        columns = sorted({name for row in self.steps for name in row} - {"step"})
        with (self.folder / "curves.csv").open("w", newline="") as stream:
            table = csv.DictWriter(stream, ["step", *columns], restval="")
            table.writeheader()
            table.writerows(self.steps)
