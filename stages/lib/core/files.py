"""Files first: where a stage writes, and how.

`rounds/<round>/<stage>/` holds what is deterministic (DVC's outputs). Wall-clock times go to
`.rondo/work/<round>/<stage>/`, which git and DVC ignore.
"""

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.types import Row

ROUNDS, REPORTS, GATES, ASSETS, WORK = (
    Path("rounds"),
    Path("reports"),
    Path("gates"),
    Path("assets"),
    Path(".rondo/work"),
)
JUDGE_CACHE = Path(".rondo/judge_cache")  # what language models answered, for all rounds and runs


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


def is_placeholder(folder: Path) -> bool:
    """Whether this folder stands for the first round's predecessor: then it holds a file EMPTY."""
    return (folder / "EMPTY").exists()


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
