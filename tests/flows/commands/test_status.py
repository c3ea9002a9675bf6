"""`rondo status` while a stage runs."""

import json
import os
from pathlib import Path

import pytest

from flows.commands.status import running_stage, state
from flows.execution.dvc_stages import RWLOCK
from flows.report.run_pages import progress
from stages.lib.core.files import stage_dir, write_text


def test_progress_leaves_out_a_line_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert progress("r0", "sft") == ""
    lines = ['{"step": 1, "loss": 2.0}\n', '{"step": 2, "loss": 1.5}\n', '{"step": 3, "lo']
    write_text(stage_dir("r0", "sft") / "metrics.jsonl", "".join(lines))
    assert progress("r0", "sft") == ": step 2, loss 1.5"
    write_text(stage_dir("r0", "sft") / "metrics.jsonl", lines[2])
    assert progress("r0", "sft") == ""


def test_a_stage_is_recorded_if_only_its_numbers_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    locks = {"sft@r0": {"outs": [{"path": "rounds/r0/sft/model", "md5": "a"}]}}
    assert state("sft@r0", None, {"sft@r0"}, locks) == "recorded"
    assert state("sft@r0", None, {"sft@r0"}, {}) == "to do"  # files of an earlier run
    write_text(Path("rounds/r0/sft/model"), "")
    assert state("sft@r0", None, {"sft@r0"}, locks) == "to do"
    assert state("sft@r0", None, set(), locks) == "done"


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        ("/home/a/flows/execution/repro.py sft@r0", "sft@r0"),
        ("/home/a/bin/dvc repro -f --single-item sft@r0", "sft@r0"),
        ("/home/a/bin/dvc repro", None),
        ("/home/repro-study/bin/dvc push", None),
    ],
)
def test_the_stage_that_runs_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, stage: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"pid": os.getpid(), "cmd": command}
    write_text(RWLOCK, json.dumps({"write": {"rounds/r0/sft": entry}}))
    assert running_stage() == stage
