"""SIGKILL of a stage, of DVC or of a run, while it changes a file: the same command, run again,
gives the same bytes.
"""

from pathlib import Path

import pytest

from tests.faults.projects import (
    CHAINS,
    FULL,
    STAGES,
    States,
    check_mlflow,
    copy,
    differences,
    run,
)


def points(chain: str, name: str, number: int) -> list[tuple[str, str, float]]:
    """`number` points of a command at equal distances, as shares of its changes of files."""
    return [(chain, name, (2 * point + 1) / (2 * number)) for point in range(number)]


KILLS = [*points("tiny", "sft@r0", 2), *points("tiny", "gate_sft@r0", 1)]
KILLS += points("small", "one round", 1)
if FULL:
    KILLS = [kill for address in STAGES for kill in points("tiny", address, 4)]
    KILLS += [kill for name in CHAINS["small"] for kill in points("small", name, 4)]
    KILLS += points("asking", "approved", 2)


@pytest.mark.parametrize(("chain", "name", "share"), KILLS)
def test_a_killed_command_run_again(
    states: States, tmp_path: Path, chain: str, name: str, share: float
) -> None:
    state = states(chain, name)
    project = copy(state.before, tmp_path / "project")
    kill_at = 1 + int(share * state.changes())
    first = run(project, state.command, kill_at=kill_at)
    assert first.killed, first.output
    again = run(project, state.command)
    assert again.code == 0, first.output + again.output
    assert not differences(project, state.after), first.output + again.output
    if name == "ppo@r0" and first.steps():  # it resumes; the other stages start again
        assert all(step >= first.steps()[-1] for step in again.steps()), again.output
    if chain == "small":
        check_mlflow(project / ".rondo/mlflow.db")
