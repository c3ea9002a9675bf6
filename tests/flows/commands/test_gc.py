"""`rondo gc`."""

import os
from contextlib import chdir, suppress
from pathlib import Path
from time import time

import pytest

from flows import cli
from flows.commands.gc import freed_bytes
from flows.core import config
from flows.core.git import git
from flows.core.locks import read_lock
from flows.core.run_locks import hold_run_lock
from flows.execution import dvc_stages
from flows.execution.dvc_stages import open_repo
from flows.execution.worktree import working_tree, workspace
from flows.report.run_record import RunRecord, pages, read_all, save
from stages.lib.core.files import write_text
from tests.flows.ages import age


def test_old_folders_and_resume_states_are_removed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, folders = project / ".rondo", project / ".rondo/workspaces"
    for name in ("old", "barred", "new"):
        with suppress(KeyboardInterrupt), workspace(name, home, pytest.fail):
            write_text(Path("rounds/r0/sft/metrics.json"), "{}")
            write_text(Path("rounds/r0/sft/model"), "x" * 2_000_000)
            raise KeyboardInterrupt
        age(folders / name, 6 if name == "new" else 8)
    write_text(folders / "barred/rounds/r0/sft/metrics.json", "{} ")
    (project / ".git/refs/heads/runs/barred.lock").touch()
    states = [project / ".rondo/work/r0/ppo" / name / "state.pt" for name in ("old", "new")]
    for state, days in zip(states, (8, 6), strict=True):
        write_text(state, "x" * 3_000_000)
        age(state, days)
    for name, days in (("old", 8), ("recent", 6)):
        write_text(home / f"reports/{name}/report.html", "x" * 4_000_000)
        record = RunRecord(
            run=name,
            named_preset="keep",
            preset="default",
            changes=[],
            isolated=False,
            flow_run=name,
            team="",
            started=0.0,
            updated=time() - days * 24 * 3600,
        )
        save(home, record)
    capsys.readouterr()

    assert cli.exit_code(["gc"]) == 0
    barred, *_, old, reports, removed_states = capsys.readouterr().out.splitlines()
    assert barred.startswith(f"{folders / 'barred'} stays, since its results cannot be committed")
    assert old.startswith("2.") and old.endswith("old; the branch runs/old stays")
    assert reports == "4.0 MB: 1 report pages of runs; MLflow keeps report.html"
    assert [one.run for one in read_all(home)] == ["recent", "old"]  # both stay in the list
    assert [*pages(home / "reports/old")] == [] and [*pages(home / "reports/recent")]
    assert removed_states.startswith("3.0 MB: 1 resume states")
    assert sorted(path.name for path in folders.iterdir()) == ["barred", "new"]
    assert [state.parent.exists() for state in states] == [False, True]
    assert git("show", "runs/old:rounds/r0/sft/metrics.json") == "{}"

    for days in ("-1", "nan"):
        assert cli.exit_code(["gc", "--older-than", days]) == 2
        assert "expected days, 0 or more" in capsys.readouterr().err
    with working_tree(home, pytest.fail):
        assert cli.exit_code(["gc", "--older-than", "0"]) == 0
    assert "the resume states stay" in capsys.readouterr().out and states[1].exists()

    assert cli.exit_code(["gc", "--older-than", "5.9"]) == 0
    assert not (folders / "new").exists() and not states[1].parent.exists()


def test_what_something_refers_to_stays_in_the_cache(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, outputs = project / ".rondo", {}

    def prepare(seed: int) -> None:
        config.write_params(config.resolve(settings=[f"seed={seed}"]))
        for address in ("inputs", "assets", "prepare@r0"):
            dvc_stages.run(address, lambda _: None)
        outputs[seed] = {out["path"]: out["md5"] for out in read_lock("prepare@r0")["outs"]}

    for name in ("branch", "workspace"):
        with workspace(name, home, pytest.fail) as folder:
            prepare(len(outputs))
    with chdir(folder):
        prepare(2)  # this is not committed
    age(home / "workspaces/branch", 8)
    prepare(3)
    prepare(4)
    capsys.readouterr()

    lock = home / "runs/id.lock"
    hold_run_lock(lock)
    assert cli.exit_code(["gc", "--cache"]) == 2
    assert "a run is running" in capsys.readouterr().err
    lock.unlink()
    write_text(home / "recorded/a-run/pipeline.json", "{}")
    assert cli.exit_code(["gc", "--cache"]) == 2
    assert "MLflow lacks records or models of 1 runs" in capsys.readouterr().err
    (home / "recorded/a-run/pipeline.json").unlink()

    assert cli.exit_code(["gc", "--cache"]) == 0
    with open_repo() as repo:
        there = {
            seed: repo.cache.local.exists(hashes["rounds/r0/prepare/data"])
            for seed, hashes in outputs.items()
        }
    assert there == {0: True, 1: True, 2: True, 3: False, 4: True}
    assert not (home / "workspaces/branch").exists()
    # the list, the file in it, and metrics.json, which git has too
    assert "3 files of DVC's cache that nothing refers to" in capsys.readouterr().out

    data = read_lock("prepare@r0")["outs"][0]["md5"]
    (project / ".dvc/cache/files/md5" / data[:2] / data[2:]).unlink()
    assert cli.exit_code(["gc", "--cache"]) == 2  # DVC cannot tell what is in use
    assert "without cache for directory 'rounds/r0/prepare/data'" in capsys.readouterr().err


def test_files_with_links_elsewhere_free_nothing(tmp_path: Path) -> None:
    for name in ("a/one", "b/kept"):
        write_text(tmp_path / name, "x" * 4096)
    os.link(tmp_path / "a/one", tmp_path / "a/two")
    os.link(tmp_path / "b/kept", tmp_path / "a/link")
    (tmp_path / "a/symlink").symlink_to(tmp_path / "b/kept")
    assert freed_bytes([tmp_path / "a"]) == 4096
    assert freed_bytes([tmp_path / "a", tmp_path / "b"]) == 2 * 4096
