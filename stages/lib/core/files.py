"""Paths of a stage's files, and functions to read, write and hash them.

`rounds/<round>/<stage>/` holds deterministic files only, because DVC tracks them by hash.
Wall-clock times go to `.rondo/work/<round>/<stage>/`, which git and DVC ignore.
"""

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from stages.lib.core.errors import STORAGE_ADVICE, BadInput
from stages.lib.core.progress import progress
from stages.lib.core.reading import parse_json, read_lines, read_text
from stages.lib.core.types import Row

ROUNDS = Path("rounds")
REPORTS = Path("reports")
GATES = Path("gates")
ASSETS = Path("assets")
WORK = Path(".rondo/work")
RESUME_STATE = "state.pt"  # in a folder of WORK: from it, a killed stage resumes
JUDGE_CACHE = Path(".rondo/judge_cache")  # answers of language-model judges, for all rounds
REVISED = "revised.jsonl"  # of annotate: a file that replay reads


def stage_dir(round_: str, stage: str) -> Path:
    """Folder of a stage's outputs, which DVC tracks."""
    return ROUNDS / round_ / stage


def find_checkpoint(round_: str, checkpoint: str) -> Path:
    """The folder of a checkpoint, given by name or path.

    Raises:
        BadInput: there is no such checkpoint; names the existing ones.
    """
    folder = stage_dir(round_, "ppo") / "checkpoints"
    for path in (folder / checkpoint, Path(checkpoint)):
        if any((path / file).exists() for file in ("adapter_config.json", "config.json")):
            return path
    names = ", ".join(sorted(path.name for path in folder.glob("step_*")))
    raise BadInput(
        f"--checkpoint {checkpoint}: no model there; "
        f"{folder} has {names or f'none (run `dvc repro ppo@{round_}`)'}; "
        "or give the folder of an adapter or a model"
    )


def work_dir(round_: str, stage: str) -> Path:
    """Folder of a stage's untracked files: clocks, checkpoints of a run in progress."""
    return WORK / round_ / stage


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file completely or not at all, even if the power fails.

    The block writes to a temporary file, which replaces `path` if the block raises nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, since several processes may write the same file.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
        rename(temporary, path)
    except OSError as error:
        if error.errno in STORAGE_ADVICE and error.filename is None:  # as that of a write
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def rename(temporary: Path, path: Path) -> None:
    """Give a file that is written completely its name, even if the power fails."""
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    # fsync of the folder makes the rename itself durable
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_unfinished(path: Path) -> None:
    """Delete what killed processes had not finished writing of a file (`replacing`). No other
    process may be writing it.
    """
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the power fails."""
    with replacing(path) as stream:
        stream.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def maker(path: Path) -> str:
    """The command that makes a file of a stage.

    >>> maker(Path("rounds/r0/sft/model/config.json"))
    'dvc repro sft@r0'
    """
    if made := re.search(r"(?:^|/)(?:rounds|\.rondo/work)/([^/]+)/([^/]+)/", path.as_posix()):
        return f"dvc repro {made[2]}@{made[1]}"
    made = re.search(r"(?:^|/)(assets)/(inputs/)?", path.as_posix())
    return f"dvc repro {'inputs' if made[2] else 'assets'}" if made else "dvc repro"


def read_json(path: Path, made_by: str | None = None) -> dict[str, Any]:
    """Read a JSON file, whose value is an object.

    Args:
        path: the file.
        made_by: the command that makes the file, for the error message; None: `maker`.

    Raises:
        BadInput: the file is missing, damaged, or has no JSON object.
    """
    return read_object(path, f"run `{made_by or maker(path)}`")


def read_object(path: Path, fix: str) -> dict[str, Any]:
    """As `read_json`; `fix` is the next step for the user, for the error message."""
    return _object(read_text(path, fix), str(path), fix)


def _object(text: str | bytes, where: str, fix: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON: {error}; {fix}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected a JSON object, got {value!r:.60}; {fix}")
    return value


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path, made_by: str | None = None, growing: bool = False) -> list[Row]:
    """`iter_jsonl` as a list."""
    return list(iter_jsonl(path, made_by, growing))


def iter_jsonl(path: Path, made_by: str | None = None, growing: bool = False) -> Iterator[Row]:
    """Read the rows of a .jsonl or .jsonl.gz file, one at a time. Blank lines are skipped.

    Args:
        path: the file.
        made_by: the command that makes the file, for the error message; None: `maker`.
        growing: whether a stage may be writing the file: then a last line without its end is left
            out.

    Raises:
        BadInput: the file is missing or damaged, or a line is no JSON object; names the line.
    """
    fix = f"run `{made_by or maker(path)}`"
    for number, line in read_lines(path, fix):
        if not growing or line.endswith(b"\n"):
            yield _object(line, f"{path}:{number}", fix)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table, e.g. for `dvc plots`."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(header)
        table.writerows(rows)


def is_placeholder(folder: Path) -> bool:
    """Whether the folder is the placeholder for the missing predecessor of the first round, or for
    a model that was not trained.

    DVC needs an existing path, so there is a folder with a file EMPTY, which says why.
    """
    return (folder / "EMPTY").exists()


def metric_name(text: str) -> str:
    """Turn a path or another text into a valid part of a metric's name.

    >>> metric_name("models/other rm")
    'models_other_rm'
    """
    return re.sub(r"[^\w-]+", "_", text).strip("_")


def json_hash(value: Any) -> str:
    """sha256 of a value of JSON; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a file, or of a folder's relative file names and contents in name order."""
    digest = hashlib.sha256()
    is_folder = path.is_dir()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if is_folder else [path]
    size = sum(file.stat().st_size for file in files)
    with progress(f"hashing {path}", size, "bytes") as hashing:
        for file in files:
            if is_folder:
                digest.update(str(file.relative_to(path)).encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
                    hashing.add(len(block))
    return digest.hexdigest()
