import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flows.core import config
from flows.core.git import git
from flows.execution import dvc_stages
from flows.execution.worktree import ENDED, collect, working_tree, workspace
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_json


def test_a_run_in_its_own_workspace_ends_as_a_branch(project: Path) -> None:
    dvc_stages.run("assets", print)
    with workspace("one", project / ".rondo") as folder:
        assert Path.cwd() == folder == project / ".rondo/workspaces/one"
        config.write_params(config.resolve(settings=["seed=4"]))
        dvc_stages.run("inputs", print)
        assert (
            dvc_stages.run("assets", print) == dvc_stages.Outcome.restored
        )  # from the shared cache
        assert dvc_stages.run("prepare@r0", print) == dvc_stages.Outcome.ran
        Path(".rondo/judge_cache/answers").touch()
        write_json(Path("reports/r0/gate_sft.json"), {"passed": True})
    assert Path.cwd() == project
    assert (project / ".rondo/judge_cache/answers").exists()  # paid answers of a judge stay
    assert git("status", "--porcelain", "--untracked-files=no") == ""
    assert git("show", "--name-only", "--format=%s", "runs/one").split() == [
        "Run",
        "one",
        "badcases/r0.jsonl",  # write_params creates it, because replay depends on it
        "dvc.lock",
        "params.yaml",
        "records/one/r0/gate_sft.json",
        "rounds/r0/prepare/metrics.json",
    ]

    clone = project / ".rondo/clone"
    git("clone", "--quiet", "--branch", "runs/one", str(project), str(clone))
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "prepare@r0"],
        cwd=clone,
        env=dvc_stages.command_environment(),
        check=True,
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert changed.stdout == ""


def test_an_interrupted_run_resumes_in_its_workspace(project: Path) -> None:
    Path("pairs.jsonl").write_text("{}\n")
    with suppress(KeyboardInterrupt), workspace("one", project / ".rondo") as folder:
        # untracked data, which params.yaml may name, are linked
        assert Path("pairs.jsonl").read_text() == "{}\n"
        params = Path("params.yaml").read_text()
        Path("params.yaml").write_text(params.replace("seed: 0", "seed: 4"))
        raise KeyboardInterrupt
    assert git("rev-parse", "runs/one") == git("rev-parse", "HEAD")
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text() + "# changed since\n")
    with workspace("one", project / ".rondo") as again:
        assert again == folder and "seed: 4" in Path("params.yaml").read_text()
    assert "seed: 4" in git("show", "runs/one:params.yaml")


def test_workspaces_are_removed_a_week_after_their_runs_have_ended(project: Path) -> None:
    home = project / ".rondo"
    with workspace("old", home), workspace("new", home):
        Path("rounds").mkdir(exist_ok=True)
    with suppress(KeyboardInterrupt), workspace("cut-off", home):
        raise KeyboardInterrupt
    os.utime(home / "workspaces/old" / ENDED, (0, 0))
    assert collect(home) == ["old"]
    assert sorted(path.name for path in (home / "workspaces").iterdir()) == ["cut-off", "new"]
    assert git("branch", "--list", "runs/old").strip() == "runs/old"


def test_runs_in_one_folder_wait_for_each_other(project: Path) -> None:
    messages: list[str] = []
    order: list[str] = []

    def second() -> None:
        with working_tree(project / ".rondo", messages.append):
            order.append("second")

    with working_tree(project / ".rondo", messages.append) as folder:
        assert folder == project and messages == []
        waiting = threading.Thread(target=second)
        waiting.start()
        while not messages:
            time.sleep(0.01)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"] and "another run is using this folder" in messages[0]


def test_code_that_is_not_committed_is_refused(project: Path) -> None:
    (project / "dvc.yaml").write_text((project / "dvc.yaml").read_text() + "# mine\n")
    with (
        pytest.raises(BadInput, match=r"commit them first:\n.*dvc\.yaml"),
        workspace("two", project / ".rondo"),
    ):
        pass
    assert not (project / ".rondo/workspaces").exists()


@pytest.mark.parametrize("name", ["slices/mine.jsonl", "badcases/r0.jsonl"])
def test_user_files_that_are_not_committed_are_refused(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).touch()  # an empty file is accepted
    with workspace("two", project / ".rondo"):
        pass
    (project / name).write_text("{}\n")
    with (
        pytest.raises(BadInput, match=f"commit them first:\n.*{name}"),
        workspace("three", project / ".rondo"),
    ):
        pass


def test_outside_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(BadInput, match="needs a git repository"),
        workspace("three", tmp_path / ".rondo"),
    ):
        pass
