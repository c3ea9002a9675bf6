import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flows.core import config
from flows.core.git import git, revision
from flows.core.run_locks import hold_run_lock
from flows.execution import dvc_stages, fork_server, worktree
from flows.execution.dvc_stages import open_repo
from flows.execution.worktree import (
    ENDED,
    WORKSPACES,
    check_committed,
    collect,
    folder_of_run,
    old_workspaces,
    working_tree,
    workspace,
)
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_json, write_text
from tests.flows.ages import age


def test_a_run_in_its_own_workspace_ends_as_a_branch(project: Path) -> None:
    addresses = dvc_stages.stage_order(["r0"])
    dvc_stages.run("assets", print)
    with workspace("one", project / ".rondo", print) as folder:
        assert Path.cwd() == folder == project / ".rondo/workspaces/one"
        config.write_params(config.resolve(settings=["seed=4"]))
        outcomes = [dvc_stages.run(address, print) for address in ("inputs", *addresses)]
        # assets come from the shared cache
        ran, restored = dvc_stages.Outcome.ran, dvc_stages.Outcome.restored
        assert outcomes == [ran, restored, ran, ran, ran, ran]
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
        "rounds/r0/evaluate/metrics.json",
        "rounds/r0/prepare/metrics.json",
        "rounds/r0/sft/metrics.json",
    ]

    # a clone of the branch computes the same
    clone = project / ".rondo/clone"
    git("clone", "--quiet", "--branch", "runs/one", str(project), str(clone))
    subprocess.run(
        [fork_server.python(), "-m", "dvc", "repro"],
        cwd=clone,
        env=dvc_stages.command_environment(),
        check=True,
    )
    assert (clone / "rounds/r0/evaluate/samples.jsonl").exists()
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert changed.stdout == ""


def test_settings_and_results_of_a_run_do_not_make_its_commit_dirty(project: Path) -> None:
    commit = git("rev-parse", "HEAD")
    with workspace("one", project / ".rondo", print):
        config.write_params(config.resolve(settings=["seed=4"]))
        dvc_stages.run("inputs", print)
        assert revision() == commit
        Path("stage.py").write_text("another program")
        assert revision() == f"{commit}-dirty"


def test_results_are_pushed_to_the_remotes_of_git_and_dvc(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    remotes = tmp_path_factory.mktemp("remotes")
    git("init", "--quiet", "--bare", str(remotes / "git"))
    git("remote", "add", "team", str(remotes / "git"))
    monkeypatch.setenv("RONDO_PUSH_TO", "team")
    lines: list[str] = []
    with workspace("one", project / ".rondo", lines.append) as folder:
        dvc_stages.run("assets", print)
    # no remote of DVC yet: the branch is not pushed without its files
    again = f"(`cd {folder} && dvc push && git push team runs/one` tries again) failed"
    assert f"pushing runs/one to team {again}" in lines[-1] and "no remote" in lines[-1]
    assert git("ls-remote", "team") == ""
    subprocess.run(
        [fork_server.python(), "-m", "dvc", "remote", "add", "-d", "team", str(remotes / "dvc")],
        check=True,
    )
    git("commit", "-qam", "a remote")
    for interrupted in (True, False):
        with suppress(KeyboardInterrupt), workspace("two", project / ".rondo", lines.append):
            dvc_stages.run("assets", print)
            if interrupted:  # e.g. cancelled: there is no time
                raise KeyboardInterrupt
        assert bool(git("ls-remote", "team")) is not interrupted
    assert lines[-1] == "pushed runs/two to team, and 1 files to DVC's remote"
    assert "refs/heads/runs/two" in git("ls-remote", "team")
    assert len([path for path in (remotes / "dvc").rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, BadInput])
def test_a_run_that_does_not_complete_is_committed_and_resumes_in_its_workspace(
    project: Path, error: type[BaseException]
) -> None:
    Path("pairs.jsonl").write_text("{}\n")
    with suppress(error), workspace("one", project / ".rondo", pytest.fail) as folder:
        # untracked data, which params.yaml may name, are linked
        assert Path("pairs.jsonl").read_text() == "{}\n"
        params = Path("params.yaml").read_text()
        Path("params.yaml").write_text(params.replace("seed: 0", "seed: 4"))
        raise error
    assert "seed: 4" in git("show", "runs/one:params.yaml")
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text() + "# changed since\n")
    with workspace("one", project / ".rondo", print) as again:
        assert again == folder and "seed: 4" in Path("params.yaml").read_text()
        Path("params.yaml").write_text(params.replace("seed: 0", "seed: 5"))
    assert "seed: 5" in git("show", "runs/one:params.yaml")


def test_workspaces_are_removed_a_week_after_their_runs_have_ended(project: Path) -> None:
    home = project / ".rondo"
    with workspace("old", home, print), workspace("new", home, print):
        Path("rounds").mkdir(exist_ok=True)
    for name, error in (("failed", BadInput), ("cut-off", KeyboardInterrupt)):
        with suppress(error), workspace(name, home, print):
            raise error
    for name in ("old", "failed", "cut-off"):
        age(home / "workspaces" / name, 7.1)
    age(home / "workspaces/new", 6.9)
    with workspace("next", home, pytest.fail):
        names = sorted(path.name for path in (home / "workspaces").iterdir())
    assert names == ["cut-off", "new", "next"]
    assert git("branch", "--list", "runs/old").strip() == "runs/old"


def test_what_a_killed_run_did_is_committed_before_its_workspace_is_removed(project: Path) -> None:
    home = project / ".rondo"
    with suppress(KeyboardInterrupt), workspace("20261123-one", home, print) as folder:
        raise KeyboardInterrupt
    write_text(folder / "rounds/r0/sft/metrics.json", "{}")
    for days, old in ((6.9, []), (7.1, [folder])):
        age(folder, days)
        assert old_workspaces(home) == old
    hold_run_lock(home / "runs/one-id.json")
    assert old_workspaces(home) == []  # its run is alive
    collect(folder)
    assert not folder.exists() and str(folder) not in git("worktree", "list")
    assert git("show", "runs/20261123-one:rounds/r0/sft/metrics.json") == "{}"


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
        workspace("two", project / ".rondo", print),
    ):
        pass
    assert not (project / ".rondo/workspaces").exists()


@pytest.mark.parametrize(
    "name", ["slices/mine.jsonl", "badcases/r0.jsonl", "approvals/r0/sft.json"]
)
def test_user_files_that_are_not_committed_are_refused(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).touch()  # an empty file is accepted
    with workspace("two", project / ".rondo", print):
        pass
    (project / name).write_text("{}\n")
    with (
        pytest.raises(BadInput, match=f"commit them first:\n.*{name}"),
        workspace("three", project / ".rondo", print),
    ):
        pass


def test_outside_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(BadInput, match="needs a git repository"),
        workspace("three", tmp_path / ".rondo", print),
    ):
        pass


def commit_all(message: str = "mine") -> None:
    git("add", "--all")
    git("commit", "--quiet", "-m", message)


def test_a_run_whose_workspace_was_removed_goes_on_from_its_branch(project: Path) -> None:
    home = project / ".rondo"
    with workspace("one", home, print) as folder:
        write_text(Path("rounds/r0/sft/metrics.json"), "{}")
        params = Path("params.yaml").read_text()
        Path("params.yaml").write_text(params.replace("seed: 0", "seed: 4"))
    results = git("rev-parse", "runs/one")
    age(folder, 8)
    with workspace("next", home, print):
        assert not folder.exists()
    with workspace("one", home, print) as again:
        assert again == folder and Path("rounds/r0/sft/metrics.json").exists()
        assert "seed: 4" in Path("params.yaml").read_text()
    assert git("rev-parse", "runs/one") == results


def test_files_that_are_not_committed_are_used_as_they_are_and_named(project: Path) -> None:
    names = ("pairs.jsonl", "données.jsonl", "gone.jsonl", "a b.py")
    for name in names:
        Path(name).write_text("committed")
    commit_all()
    for name in names:
        Path(name).write_text("edited")
    Path("gone.jsonl").unlink()
    Path("neue Päärchen.jsonl").write_text("untracked")
    messages: list[str] = []
    with workspace("one", project / ".rondo", messages.append):
        for name in (*names[:2], names[3]):
            assert Path(name).read_text() == "edited"
            (project / name).write_text("edited while the run runs")
            assert Path(name).read_text() == "edited"
        assert not Path("gone.jsonl").exists()
        assert Path("neue Päärchen.jsonl").read_text() == "untracked"
    [message] = messages
    assert message.startswith("not committed, used as they are now: ")
    assert set(message.partition("now: ")[2].split(", ")) == set(names)


def test_what_params_name_is_there_even_if_git_ignores_it(project: Path) -> None:
    Path(".gitignore").write_text(Path(".gitignore").read_text() + "/data/\n/models/\n")
    commit_all()
    write_text(Path("data/pairs.jsonl"), "{}")
    write_text(Path("models/mine/config.json"), "{}")
    write_text(Path("data/other.jsonl"), "{}")
    inputs = [Path("data/pairs.jsonl"), Path("models/mine"), Path("org/hub-name")]
    with workspace("one", project / ".rondo", print, inputs):
        assert Path("data/pairs.jsonl").read_text() == "{}"
        assert Path("models/mine/config.json").read_text() == "{}"
        assert not Path("data/other.jsonl").exists()


def test_large_files_are_linked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree, "MAX_COPIED_BYTES", 3)
    for name, text in (("small", "123"), ("large", "1234")):
        Path(name).write_text(text)
    with workspace("one", project / ".rondo", print):
        assert [Path(name).is_symlink() for name in ("small", "large")] == [False, True]
        assert Path("large").read_text() == "1234"


def test_the_projects_own_local_config_of_dvc_is_kept(project: Path) -> None:
    remote = "['remote \"far\"']\n    url = https://far/x\n    password = secret\n"
    own = f"{remote}[cache]\n    type = symlink\n"
    Path(".dvc/config.local").write_text(own)
    with workspace("one", project / ".rondo", print), open_repo() as repo:
        assert repo.config["remote"]["far"]["password"] == "secret"
        assert repo.config["cache"]["type"] == ["symlink"]
        assert repo.cache.local_cache_dir == str(project / ".dvc/cache")
    assert Path(".dvc/config.local").read_text() == own


def test_nobody_signs_and_a_killed_gits_lock_is_removed(project: Path) -> None:
    git("config", "commit.gpgsign", "true")
    git("config", "gpg.program", "false")
    with workspace("one", project / ".rondo", pytest.fail):
        write_text(Path("rounds/r0/sft/metrics.json"), "{}")
        Path(git("rev-parse", "--git-path", "index.lock")).touch()
    assert "rounds/r0/sft/metrics.json" in git("show", "--name-only", "runs/one")


def test_a_run_whose_results_cannot_be_committed_is_no_failure_and_is_kept(project: Path) -> None:
    messages: list[str] = []
    with workspace("one", project / ".rondo", messages.append) as folder:
        write_text(Path("rounds/r0/sft/metrics.json"), "{}")
        (project / ".git/refs/heads/runs/one.lock").touch()
    [message] = messages
    assert f"committing {folder} to the branch runs/one failed" in message
    assert (folder / "rounds/r0/sft/metrics.json").exists() and not (folder / ENDED).exists()


@pytest.mark.parametrize("left", ["locked", "without .git", "without the folder"])
def test_a_workspace_whose_creation_was_cut_off_is_made_anew(project: Path, left: str) -> None:
    folder = project / ".rondo/workspaces/one"
    git("worktree", "add", "--quiet", "-b", "runs/one", str(folder), "HEAD")
    if left == "locked":  # as git itself does while it is creating it
        git("worktree", "lock", "--reason", "initializing", str(folder))
    else:
        (folder / ".git").unlink()
    if left == "without the folder":
        shutil.rmtree(folder)
    with workspace("one", project / ".rondo", pytest.fail):
        assert Path("dvc.yaml").exists()


def test_where_no_branch_of_a_run_can_be_made_the_reason_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("branch", "runs")
    with pytest.raises(BadInput, match="`git branch -m runs OTHER`"):
        check_committed()
    git("branch", "-m", "runs", "other")
    check_committed()
    monkeypatch.chdir(project / "approvals")  # as a project in a folder of a larger repository
    with pytest.raises(BadInput, match=r"folder or a submodule of another \(approvals/\): switch"):
        check_committed()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own, of its own tests
    for command in (check_committed, revision):
        with pytest.raises(BadInput, match=r"config --global --add safe\.directory"):
            command()


def test_hooks_do_not_run(project: Path) -> None:
    for name in ("post-checkout", "pre-commit", "post-commit"):
        hook = project / ".git/hooks" / name
        write_text(hook, "#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    with workspace("one", project / ".rondo", pytest.fail):
        write_text(Path("rounds/r0/sft/metrics.json"), "{}")
    assert git("log", "-1", "--format=%s", "runs/one") == "Run one"


def test_a_run_is_the_name_of_a_workspace(tmp_path: Path) -> None:
    """The code in that folder runs."""
    folder = tmp_path / WORKSPACES / "20270102-030405-abc"
    (folder / "stages").mkdir(parents=True)
    assert folder_of_run(folder.name, tmp_path) == folder
    for run in (str(tmp_path), "..", ".", "../workspaces", f"{folder.name}/stages", "*", "x"):
        with pytest.raises(BadInput, match="is not a folder"):
            folder_of_run(run, tmp_path)
