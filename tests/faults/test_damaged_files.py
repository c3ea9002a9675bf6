"""One damaged file in a project whose stages have run, and the command that reads it."""

import os
from pathlib import Path

import pytest
import torch

from stages.lib.core.errors import BadInput
from stages.ppo.common.resume import Resume
from tests.faults.projects import CHAINS, FULL, State, States, copy, differences, run

READ = [  # a file, the stage that made it, a stage that reads it
    ("rounds/r0/prepare/data/sft_train.jsonl", "prepare@r0", "sft@r0"),
    ("rounds/r0/sft/metrics.json", "sft@r0", "gate_sft@r0"),
    ("assets/model/model.safetensors", "assets", "sft@r0"),
    ("rounds/r0/ppo/policy/adapter_model.safetensors", "ppo@r0", "capability@r0"),
    ("rounds/r0/champion/start.json", "champion@r0", "ppo@r0"),
]


def cut_to_half(path: Path) -> None:
    """As a failing disk does it: its times and its mode stay."""
    status, content = path.stat(), path.read_bytes()
    assert len(content) > 1, f"{path} is empty"
    path.chmod(0o600)
    path.write_bytes(content[: len(content) // 2])
    path.chmod(status.st_mode & 0o777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def check_restored(state: State, project: Path, file: str, maker: tuple[str, ...]) -> None:
    """The stages either restore the file, or refuse it by name and restore it the next time."""
    for command in (maker, state.command):
        ended = run(project, command)
        if ended.code:
            break
    if ended.code:
        assert "StorageFailed: " in ended.output or "BadInput: " in ended.output, ended.output
        assert file in ended.output or str(Path(file).parent) in ended.output, ended.output
        assert "Traceback" not in ended.output, ended.output
        assert not run(project, maker).code and not run(project, state.command).code
    assert not differences(project, state.after), ended.output


@pytest.mark.parametrize(("file", "maker", "reader"), READ if FULL else READ[:1])
def test_a_file_that_a_stage_reads(
    states: States,
    tmp_path: Path,
    file: str,
    maker: str,
    reader: str,
) -> None:
    """DVC trusts times and sizes: what changes neither is not found."""
    state = states("tiny", reader)
    project = copy(state.before, tmp_path / "project")
    assert run(project, CHAINS["tiny"][maker]).output == "unchanged\n"
    cut_to_half(project / file)
    check_restored(state, project, file, CHAINS["tiny"][maker])


def test_each_flipped_bit_of_a_resume_state_is_found(tmp_path: Path) -> None:
    resume = Resume(tmp_path, {"seed": 1})
    resume.save({"weights": torch.arange(16.0)})
    assert resume.load() is not None
    content = resume.path.read_bytes()
    for position in range(len(content)):
        flipped = content[position] ^ 1 << position % 8
        resume.path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        with pytest.raises(BadInput, match=r"state.pt: damaged.* Next: `rm -r"):
            resume.load()
