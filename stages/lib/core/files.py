"""Files first: where a stage writes, and how.

`rounds/<round>/<stage>/` holds what is deterministic (DVC's outputs). Wall-clock times go to
`.rondo/work/<round>/<stage>/`, which git and DVC ignore.
"""

import csv
import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput

ROUNDS, REPORTS, GATES, ASSETS, WORK = (
    Path("rounds"),
    Path("reports"),
    Path("gates"),
    Path("assets"),
    Path(".rondo/work"),
)
JUDGE_CACHE = Path(".rondo/judge_cache")  # what language models answered, for all rounds and runs
Row = dict[str, Any]


def stage_dir(round_: str, stage: str) -> Path:
    return ROUNDS / round_ / stage


def work_dir(round_: str, stage: str) -> Path:
    return WORK / round_ / stage


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all: a temporary file, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path, made_by: str) -> Any:
    """Read a JSON file; `made_by` is the command that makes it, named when it is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path} is missing: run `{made_by}`") from None


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path, made_by: str) -> list[Row]:
    """The rows of a .jsonl or .jsonl.gz file; `made_by` is the command that makes it, named when it
    is missing.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as lines
        ):
            return [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError:
        raise BadInput(f"{path} is missing: run `{made_by}`") from None


def is_real(folder: Path) -> bool:
    """Whether this folder is of a round: those of the first round's predecessor hold a file EMPTY."""
    return not (folder / "EMPTY").exists()


def metric_name(text: str) -> str:
    """A path or the like as part of a metric's name."""
    return re.sub(r"[^\w-]+", "_", text).strip("_")


def file_hash(path: Path) -> str:
    """sha256 of a file, or of a folder's files in name order."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


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


class Recorder:
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
            self.say(step, shown)

    def say(self, step: int, text: str) -> None:
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
