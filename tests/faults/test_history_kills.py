"""SIGKILL while a round ends or begins again, of an isolated run, and of a decision on a gate."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import RUN, Report, check_ended
from tests.faults.lab import Ended, Kill, copy, kill_at, rondo
from tests.faults.scale import FULL, sample
from tests.faults.servers import trial_of
from tests.faults.test_run_kills import check_records

TWO_ROUNDS = ("run", "--rounds", "2", "--set", "sft.max_steps=9")
BEGIN_AGAIN = (*TWO_ROUNDS, "--rerun", "r0")
ISOLATED = (*RUN, "--isolated")
ASKING = (*RUN, "--set", "gates.sft.loss_drop=0.9", "--set", "gates.sft.policy=ask")
APPROVE = ("approve", "sft", "r0", "--by", "Ada", "--reason", "enough")
HISTORY: list[tuple[str, tuple[str, ...], Kill]] = [  # project before, command, point
    ("one round", TWO_ROUNDS, ("rename", "rounds/r0/stages.lock", 1)),
    ("one round", TWO_ROUNDS, ("rename", "rounds/r0/params.yaml", 1)),
    ("one round", TWO_ROUNDS, ("rename", "params.yaml", 1)),
    ("one round", TWO_ROUNDS, ("rename", "rounds/r0/dvc.yaml", 1)),
    ("one round", TWO_ROUNDS, ("rename", "rounds/r0.dvc", 1)),
    ("one round", TWO_ROUNDS, ("rename", "dvc.lock", 1)),
    ("two rounds", BEGIN_AGAIN, ("rename", "dvc.lock", 1)),
    ("two rounds", BEGIN_AGAIN, ("remove", "rounds/r0.dvc", 1)),
    ("two rounds", BEGIN_AGAIN, ("rename", "params.yaml", 1)),
    ("two rounds", BEGIN_AGAIN, ("remove", "rounds/r0/params.yaml", 1)),
    ("two rounds", BEGIN_AGAIN, ("remove", "rounds/r0/stages.lock", 1)),
    ("two rounds", BEGIN_AGAIN, ("remove", "rounds/r0/dvc.yaml", 1)),
]
WITHOUT_SETTINGS: list[Kill] = [  # the run has not recorded them yet
    ("open", ".rondo/workspaces/*-*-*/params.yaml", 1),
    ("open", ".rondo/workspaces/*-*-*/.rondo/made", 1),
]
ISOLATED_KILLS: list[Kill] = [
    ("rename", "params.yaml", 1),
    ("rename", ".rondo/work/r0/sft/made.json", 1),
    ("open", "records/*-*-*/summary.md", 1),
    ("open", ".rondo/ended", 1),
]
full = pytest.mark.skipif(not FULL, reason="minutes: make test-faults")


@pytest.fixture(scope="session")
def history(finished: Path, built_once: Callable[..., Path]) -> dict[str, Path]:
    """The projects `one round`, `two rounds` and `begun again`; the workspace `isolated`."""

    def build(folder: Path) -> None:
        project = copy(finished / "after", folder / "project")
        for name, command in (("two rounds", TWO_ROUNDS), ("begun again", BEGIN_AGAIN)):
            check_ended(rondo(project, command))
            copy(project, folder / name)
        project = copy(finished / "before", folder / "with a workspace")
        check_ended(rondo(project, ISOLATED))
        (workspace,) = (project / ".rondo/workspaces").iterdir()
        copy(workspace, folder / "isolated")

    built = built_once("history", build)
    names = ("two rounds", "begun again", "isolated")
    return {"one round": finished / "after"} | {name: built / name for name in names}


@full
@pytest.mark.parametrize(("before", "command", "kill"), sample(HISTORY, 4), ids=str)
def test_a_kill_while_a_round_ends_or_begins_again(
    history: dict[str, Path],
    tmp_path: Path,
    before: str,
    command: tuple[str, ...],
    kill: Kill,
    report: Report,
) -> None:
    project = copy(history[before], tmp_path / "project")
    first = kill_at(project, command, kill)
    second = rondo(project, command)
    after = history["two rounds" if command == TWO_ROUNDS else "begun again"]
    trial = trial_of(f"{command}, {kill}", first, second, project, after)
    report("SIGKILL of rondo run: a round ends or begins again", [trial], ("identical", "again"))
    check_records(project)
    shutil.rmtree(project)


def kill_isolated(before: Path, project: Path, kill: Kill) -> tuple[Ended, Path]:
    """A killed isolated run in a copy of a project, and its workspace."""
    first = kill_at(copy(before, project), ISOLATED, kill)
    (workspace,) = (project / ".rondo/workspaces").iterdir()
    return first, workspace


def check_branch(project: Path, workspace: Path, isolated: Path) -> None:
    """The results of an undisturbed run, `isolated`, are also on the branch of the workspace."""
    for name in ("params.yaml", "dvc.lock", "rounds/r0/evaluate/metrics.json"):
        command = ["git", "show", f"runs/{workspace.name}:{name}"]
        branch = subprocess.run(command, cwd=project, capture_output=True, check=True)
        assert branch.stdout == (isolated / name).read_bytes()


@full
@pytest.mark.parametrize("kill", sample(ISOLATED_KILLS, 1), ids=str)
def test_a_kill_of_an_isolated_run(
    finished: Path, history: dict[str, Path], tmp_path: Path, kill: Kill, report: Report
) -> None:
    project, isolated = tmp_path / "project", history["isolated"]
    first, workspace = kill_isolated(finished / "before", project, kill)
    second = rondo(project, ("run", "--continue", workspace.name))
    trial = trial_of(f"isolated, {kill}", first, second, workspace, isolated)
    report("SIGKILL of an isolated run", [trial], ("identical", "again"))
    check_branch(project, workspace, isolated)
    check_records(project)
    shutil.rmtree(project)


@full
@pytest.mark.parametrize("kill", sample(WITHOUT_SETTINGS, 1), ids=str)
def test_a_kill_of_an_isolated_run_before_it_has_settings(
    finished: Path, history: dict[str, Path], tmp_path: Path, kill: Kill, report: Report
) -> None:
    """It cannot go on, since the settings of the command are lost: the same command runs again."""
    project, isolated = tmp_path / "project", history["isolated"]
    first, killed = kill_isolated(finished / "before", project, kill)
    refused = rondo(project, ("run", "--continue", killed.name))
    assert refused.code == 2 and "before it had recorded its settings" in refused.output, refused
    second = rondo(project, ISOLATED)
    (workspace,) = set((project / ".rondo/workspaces").iterdir()) - {killed}
    trial = trial_of(f"isolated, {kill}", first, second, workspace, isolated)
    report("SIGKILL of an isolated run that has no settings yet", [trial])
    check_branch(project, workspace, isolated)
    check_records(project)
    shutil.rmtree(project)


@full
def test_a_kill_of_a_decision(finished: Path, tmp_path: Path, report: Report) -> None:
    waiting = copy(finished / "before", tmp_path / "waiting")
    assert "rondo approve sft r0" in rondo(waiting, ASKING).output
    undisturbed, project = (copy(waiting, tmp_path / name) for name in ("undisturbed", "project"))
    check_ended(rondo(undisturbed, APPROVE))
    check_ended(rondo(undisturbed, ASKING))
    first = kill_at(project, APPROVE, ("rename", "approvals/r0/sft.json", 1))
    assert not list((project / "approvals").rglob("*.json"))
    check_ended(rondo(project, APPROVE))
    trial = trial_of("rondo approve", first, rondo(project, ASKING), project, undisturbed)
    report("SIGKILL of rondo approve", [trial])
    check_records(project)
