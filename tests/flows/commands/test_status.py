"""`rondo status` while a stage runs."""

from pathlib import Path

import pytest

from flows.commands.status import progress
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
