"""What killed processes leave does not stay, and does not hold up DVC."""

import shutil
import time
from pathlib import Path

import pytest

from flows.execution import dvc_stages, leftovers
from stages.lib.core.files import write_text

RUN_CACHE = Path(".dvc/cache/runs")
HASH = "0123456789abcdef" * 4


def entries() -> set[Path]:
    return set(RUN_CACHE.glob("*/*/*"))


def test_dvc_runs_after_another_was_killed_as_it_made_a_folder_of_its_run_cache(
    project: Path,
) -> None:
    dvc_stages.run("assets", print)
    lock, of_assets = Path("dvc.lock").read_text(), entries()
    dvc_stages.run("prepare@r0", print)
    [entry] = entries() - of_assets
    entry.unlink()
    Path("dvc.lock").write_text(lock)
    assert dvc_stages.run("prepare@r0", print) == dvc_stages.Outcome.ran
    assert entry.exists()


def test_entries_of_the_run_cache_stay_and_unfinished_ones_go(project: Path) -> None:
    for address in ("assets", "prepare@r0"):
        dvc_stages.run(address, print)
    complete = entries()
    first = min(complete)
    write_text(first.with_name(".unfinished.tmp"), "cmd: py")
    young = RUN_CACHE / HASH[:2] / HASH
    young.mkdir(parents=True)
    made = young.stat().st_mtime
    with dvc_stages.open_repo() as repo:
        leftovers.repair_run_cache(repo)
    assert entries() == complete
    assert not young.exists()
    # another clone may have made the folder just now
    assert time.time() >= made + leftovers.WRITING_SECONDS


def test_temporary_files_of_an_unchanged_stage_are_removed(finished_project: Path) -> None:
    unfinished = [
        Path("rounds/r0/evaluate/data/.rows.jsonl.0123.tmp"),
        Path(".rondo/work/r0/evaluate/.clock.jsonl.0123.tmp"),
        Path("gates/r0/.sft.ok.0123.tmp"),
        Path("reports/r0/.gate_sft.json.0123.tmp"),
        Path("reports/r0/.hvvMjYl97_HJ-hQoT0KDkw.tmp"),
    ]
    of_others = [
        Path("reports/.report.html.0123.tmp"),
        Path("reports/r0/.checkpoint_step_00009_01234567.json.0123.tmp"),
    ]
    for path in unfinished + of_others:
        write_text(path, "half")
    outcomes = [dvc_stages.run(address, print) for address in dvc_stages.stage_order(["r0"])]
    assert set(outcomes) == {dvc_stages.Outcome.unchanged}
    assert not any(path.exists() for path in unfinished)
    assert all(path.exists() for path in of_others)


def test_a_state_is_not_left_without_the_rollouts_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run would resume from it."""

    def interrupted(folder: Path) -> None:
        assert folder == state.parent
        raise KeyboardInterrupt

    state = tmp_path / "run/state.pt"
    write_text(state, "update 7")
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leftovers.remove_state(state)
    assert not state.exists()
