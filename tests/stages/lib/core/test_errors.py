import errno
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from flows.core.config import settable_keys
from stages.lib.core.errors import (
    LESS_MEMORY,
    BadInput,
    OutOfMemory,
    StorageFailed,
    memory_advice,
    typed,
)
from stages.lib.core.model_folders import damage_named
from tests.paths import ROOT

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rounds/r0/sft/model")


def raised_by(error: Exception, cause: BaseException | None) -> Exception:
    try:
        raise error from cause
    except Exception as chained:
        return chained


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (FULL, ("[Errno 28] No space left on device: 'rounds/r0/sft/model'", "`rondo gc`")),
        (OSError(errno.EROFS, "Read-only file system", "x"), ("'x'", "mount")),
        (OSError(errno.EIO, "Input/output error", "x"), ("'x'", "dmesg")),
        # as safetensors prints it
        (SafetensorError("I/O error: No space left on device (os error 28)"), ("`df -i`",)),
        # DVC keeps hashes in SQLite
        (sqlite3.OperationalError("database or disk is full"), ("`df -i`",)),
        (sqlite3.OperationalError("disk I/O error"), ("dmesg",)),
        # torch.save raises another error than the stream that it writes to
        (raised_by(RuntimeError("unexpected pos 64 vs 0"), FULL), ("[Errno 28]", "`rondo gc`")),
    ],
)
def test_an_error_of_the_disk_has_a_type_and_a_next_step(
    error: Exception, parts: tuple[str, ...]
) -> None:
    failure = typed(error)
    assert isinstance(failure, StorageFailed)
    assert all(part in str(failure) for part in parts)
    assert "run the same command again" in str(failure)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "x"), ValueError("28")])
def test_other_errors_have_none(error: Exception) -> None:
    assert typed(error) is None


def test_a_typed_error_stays_what_it_is() -> None:
    error = BadInput("ppo.gamma: expected at most 1")
    assert typed(raised_by(error, FULL)) is error


def test_a_stage_on_a_full_disk_ends_in_one_line_with_5(tmp_path) -> None:
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    program = (
        "from stages.lib.core.stage import stage_main\n"
        "def stage(params, round_):\n"
        "    with open('/dev/full', 'w') as stream:\n"
        "        stream.write('x')\n"
        "stage_main('example', stage)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 5
    assert ended.stderr.startswith("example: StorageFailed: [Errno 28] No space left on device")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore"),
        raised_by(ValueError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_memory_that_runs_out_has_a_type_and_the_keys_of_the_stage(error: Exception) -> None:
    failure = typed(error, "ppo@r0")
    assert isinstance(failure, OutOfMemory) and failure.exit_code == 6
    assert "Next: lower ppo.micro_batch_size" in str(failure) and "\n" not in str(failure)
    assert "Next: choose a smaller assets.model" in str(typed(error, "rondo"))


def test_torch_prints_what_is_recognised() -> None:
    import torch

    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 46)
    assert isinstance(typed(failed.value), OutOfMemory)


def test_the_keys_to_lower_are_settings() -> None:
    settable = set(settable_keys())
    for stage in LESS_MEMORY:
        advice = memory_advice(f"{stage}@r0")
        named = re.findall(r"\b[a-z]+\.[a-z_]+\b", advice)
        assert named and set(named) <= settable, advice


@pytest.mark.parametrize(
    "text", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"]
)
def test_memory_that_runs_out_is_no_damage_of_a_models_folder(text: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=re.escape(text)) as raised, damage_named(tmp_path):
        raise RuntimeError(text)
    assert isinstance(typed(raised.value, "sft"), OutOfMemory)
