"""`dvc_stages` in a real DVC project with small stages (see conftest)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zc.lockfile
from dvc.lock import DEFAULT_TIMEOUT
from dvc.utils.serialize import dumps_yaml, loads_yaml

from flows.core import config
from flows.execution import dvc_stages, fork_server, process_guard
from stages.lib.core import progress
from stages.lib.core.errors import BadInput, GateFailed, OutOfMemory, RondoError, Unreachable
from stages.lib.core.files import JUDGE_CACHE, write_text
from stages.lib.core.judge_answers import record_answers
from stages.lib.judging.chat import AnswerCache
from tests.flows.reproduce import reproduce
from tests.servers import of_project, until


def set_params(*settings: str) -> None:
    config.write_params(config.resolve(settings=settings))


def run_to(last: str, lines: list[str] | None = None) -> dvc_stages.Outcome:
    addresses = dvc_stages.stage_order(["r0"])
    reproduce(addresses[: addresses.index(last)])
    return dvc_stages.run(last, (lines if lines is not None else []).append)


def test_a_stage_runs_is_unchanged_or_restored_and_its_lines_are_streamed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dvc_stages, "QUIET_SECONDS", float("inf"))
    lines: list[str] = []
    assert run_to("prepare@r0", lines) == dvc_stages.Outcome.ran
    assert lines == [
        "[prepare@r0] step 1/3  eta 0:02",
        "[prepare@r0] step 2/3  eta 0:01",
        "[prepare@r0] step 3/3  eta 0:00",
    ]
    assert dvc_stages.run("prepare@r0", lines.append) == dvc_stages.Outcome.unchanged
    set_params("seed=1")
    assert [dvc_stages.up_to_date(address) for address in ("assets", "prepare@r0")] == [True, False]
    assert dvc_stages.run("prepare@r0", lines.append) == dvc_stages.Outcome.ran
    set_params("seed=0")
    assert dvc_stages.run("prepare@r0", lines.append) == dvc_stages.Outcome.restored
    rows = project / "rounds/r0/prepare/data/rows.jsonl"
    assert rows.read_text() == '{"id": "r0", "seed": 0}\n'


def test_what_happens_while_the_stage_prints_nothing_is_reported(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dvc_stages, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    lines: list[str] = []
    run_to("prepare@r0", lines)
    own = [line for line in lines if line.startswith("[prepare@r0]")]
    matches = [match for line in own if (match := progress.PROGRESS.match(line))]
    assert list(dict.fromkeys(match["what"] for match in matches)) == [
        dvc_stages.DVC_COMPARES,
        dvc_stages.STAGE_STARTS,
        "step",
        dvc_stages.DVC_STORES,
    ]


def test_a_line_of_dvc_that_is_not_shown_is_no_sign_of_life(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines of `dvc repro`, about its lock file, are not shown: silence goes on."""
    shown: list[float] = []
    monkeypatch.setattr(progress.Reporter, "printed", lambda _: shown.append(time.monotonic()))
    lines: list[str] = []
    run_to("prepare@r0", lines)
    assert len(shown) == len(lines) > 0


def test_dvc_lock_is_written_as_dvc_writes_it(project: Path) -> None:
    set_params("sft.max_steps=null", "sft.learning_rate=1e-5")
    run_to("prepare@r0")
    with (project / "dvc.lock").open("a") as stream:
        stream.write("datasets: []\n")  # another section of DVC's
    run_to("evaluate@r0")
    text = (project / "dvc.lock").read_text()
    assert "\ndatasets: []\n" in text
    assert text == dumps_yaml(json.loads(json.dumps(loads_yaml(text))))
    assert "max_steps:\n" in text
    assert all(dvc_stages.up_to_date(address) for address in dvc_stages.stage_order(["r0"]))


@pytest.mark.parametrize("with_fork_server", [True, False])
def test_a_dvc_that_is_killed_loses_no_other_stage(
    project: Path, monkeypatch: pytest.MonkeyPatch, with_fork_server: bool
) -> None:
    run_to("prepare@r0")
    if not with_fork_server:
        monkeypatch.delenv(fork_server.VARIABLE)
    lock = project / "dvc.lock"
    before = lock.read_text()

    def kill_dvc(_: str) -> None:
        for process in of_project(project, "flows.execution.repro"):
            if process_guard.__file__ not in process.info["cmdline"]:
                process.kill()

    with pytest.raises(OutOfMemory, match=r"exit code 137(.|\n)*lower sft\.per_device_train"):
        dvc_stages.run("sft@r0", kill_dvc)
    assert lock.read_text() == before


def test_a_failed_stage_keeps_what_others_wrote_to_dvc_lock_meanwhile(project: Path) -> None:
    run_to("prepare@r0")
    set_params("sft.max_steps=3")  # crashes
    lock = project / "dvc.lock"

    def commit(_: str) -> None:
        """`dvc commit` in another terminal."""
        lock.write_text(lock.read_text().replace("size:", "nfiles: 1\n      size:", 1))

    with pytest.raises(RondoError, match="no such thing"):
        dvc_stages.run("sft@r0", commit)
    assert "nfiles: 1" in lock.read_text()


COMMAND = "dvc repro --single-item prepare@r0"


def write_rwlock(writer: int, reader: int) -> str:
    """DVC's list of the paths in use by two processes."""
    entry = {"pid": writer, "cmd": COMMAND}
    others = [{"pid": reader, "cmd": "dvc push"}]
    lists = {"write": {"rounds/r0/prepare/data": entry}, "read": {"assets/data": others}}
    write_text(dvc_stages.RWLOCK, json.dumps(lists))
    return dvc_stages.RWLOCK.read_text()


def test_without_git_the_next_step_is_named_and_lets_dvc_work(project: Path) -> None:
    shutil.rmtree(".git")
    with pytest.raises(BadInput, match=r"not a git repository\. Next: `git init` makes one"):
        dvc_stages.stage_order(["r0"])
    subprocess.run([sys.executable, "-m", "dvc", "config", "core.no_scm", "true"], check=True)
    assert dvc_stages.stage_order(["r0"])[0] == "assets"


def test_a_list_of_paths_in_use_holds_dvc_up_only_while_its_commands_run(project: Path) -> None:
    """A process that began after the list was written is another one, e.g. in a container that was
    restarted, where numbers begin at 1 again.
    """
    with subprocess.Popen(["sleep", "600"]) as other:
        text = write_rwlock(other.pid, os.getpid())
        with dvc_stages.open_repo():
            assert dvc_stages.RWLOCK.read_text() == text
        assert dvc_stages.running_commands() == [COMMAND, "dvc push"]
        hour_ago = time.time() - 3600
        os.utime(dvc_stages.RWLOCK, (hour_ago, hour_ago))
        assert dvc_stages.running_commands() == []
        assert dvc_stages.run("assets", print) == dvc_stages.Outcome.ran
        other.kill()
    # killed while it wrote the list
    for address, text in (("prepare@r0", ""), ("sft@r0", '{"write": {"a')):
        write_text(dvc_stages.RWLOCK, text)
        assert dvc_stages.run(address, print) == dvc_stages.Outcome.ran


def test_dvc_runs_after_another_was_killed_as_it_made_a_folder_of_its_run_cache(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, waited = "*/*/*", list[float]()
    monkeypatch.setattr(time, "sleep", waited.append)  # another DVC may be writing into the folder
    dvc_stages.run("assets", print)
    runs, lock = Path(".dvc/cache/runs"), Path("dvc.lock").read_text()
    of_assets = {*runs.glob(entries)}
    dvc_stages.run("prepare@r0", print)
    [entry] = {*runs.glob(entries)} - of_assets
    entry.unlink()
    Path("dvc.lock").write_text(lock)
    waited.clear()
    assert dvc_stages.run("prepare@r0", print) == dvc_stages.Outcome.ran
    assert entry.exists() and of_assets < {*runs.glob(entries)}
    assert dvc_stages.WRITING_SECONDS in waited


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
    for address in ("evaluate@r0", "gate_sft@r0"):
        assert dvc_stages.run(address, print) == dvc_stages.Outcome.unchanged
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
        dvc_stages.remove_state(state)
    assert not state.exists()


def test_a_failed_gate_reports_its_numbers_and_stops_later_stages(project: Path) -> None:
    set_params("gates.sft.loss_drop=0.9")
    message = (
        r"gate sft of r0 failed:\n"
        r"sft.loss_before - sft.loss_after 0.5, wanted >= 0.9: it learnt too little"
    )
    with pytest.raises(GateFailed, match=message):
        run_to("gate_sft@r0")
    with pytest.raises(RondoError, match=r"gates/r0/sft\.ok"):
        dvc_stages.run("evaluate@r0", print)
    set_params("gates.sft.loss_drop=0.4")
    addresses = dvc_stages.stage_order(["r0"])
    todo = {"gate_sft@r0", "evaluate@r0"}
    assert dvc_stages.order_and_changes(["r0"]) == (addresses, todo)
    assert run_to("evaluate@r0") == dvc_stages.Outcome.ran
    assert dvc_stages.order_and_changes(["r0"]) == (addresses, set())
    # an older threshold: its gate comes from DVC's cache, with the verdict of that time
    with pytest.raises(GateFailed):
        set_params("gates.sft.loss_drop=0.9")
        run_to("gate_sft@r0")
    mark, verdict = project / "gates/r0/sft.ok", project / "reports/r0/gate_sft.json"
    assert not mark.exists() and not json.loads(verdict.read_text())["passed"]
    set_params("gates.sft.loss_drop=0.4")
    assert run_to("gate_sft@r0") == dvc_stages.Outcome.restored
    assert mark.read_text() == "passed\n" and json.loads(verdict.read_text())["passed"]
    set_params("seed=1")
    assert dvc_stages.order_and_changes(["r0"]) == (addresses, {*addresses} - {"assets"})


def test_a_failed_stage_keeps_its_kind_of_error_and_last_lines(project: Path) -> None:
    set_params("sft.max_steps=1")
    with pytest.raises(BadInput, match="rows missing") as raised:
        run_to("sft@r0")
    message = str(raised.value)
    assert message.count("sft@r0: ") == 1 and "BadInput" not in message
    set_params("sft.max_steps=8")
    with pytest.raises(Unreachable, match="no answer") as raised:
        run_to("sft@r0")
    message = str(raised.value)
    assert message.count("sft@r0: ") == 1 and "Unreachable" not in message
    assert raised.value.exit_code == 4
    set_params("sft.max_steps=3")
    crash = r"sft@r0 ended with exit code 1:\n(.|\n)*ValueError: no such thing"
    with pytest.raises(RondoError, match=crash) as raised:
        run_to("sft@r0")
    assert raised.value.exit_code == 1
    with pytest.raises(BadInput, match="nope"):
        dvc_stages.run("nope@r0", print)


def test_an_interrupt_ends_the_stage(project: Path) -> None:
    set_params("sft.max_steps=2")  # sleeps for ten minutes
    run_to("prepare@r0")

    def interrupt() -> None:
        until(lambda: of_project(project, "stage.py"))
        os.kill(os.getpid(), signal.SIGINT)

    # The tests may be a background job, whose SIGINT is ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            dvc_stages.run("sft@r0", print)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert of_project(project, "stage.py") == []


def test_a_killed_parent_leaves_no_orphan(project: Path) -> None:
    set_params("sft.max_steps=2")
    run_to("prepare@r0")
    code = "from flows.execution import dvc_stages; dvc_stages.run('sft@r0', print)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: of_project(project, "stage.py"))
    parent.kill()
    parent.wait()
    until(lambda: not of_project(project, "stage.py"))


def test_the_error_of_a_stage_is_its_exit_code_whatever_it_printed(project: Path) -> None:
    set_params("sft.max_steps=41")
    with pytest.raises(BadInput, match="worker exited with 4"):
        run_to("sft@r0")


@contextmanager
def dvc_is_locked(project: Path) -> Iterator[None]:
    """As while another `dvc`, e.g. `dvc push`, runs in this folder."""
    lock = zc.lockfile.LockFile(str(project / ".dvc/tmp/lock"))
    try:
        yield
    finally:
        lock.close()


def test_a_stage_that_ends_while_dvc_is_locked_is_recorded_when_it_is_free(project: Path) -> None:
    set_params("sft.max_steps=51")  # ends when the file `go` is there
    run_to("prepare@r0")

    def lock_for_longer_than_dvc_waits_by_default() -> None:
        until(lambda: (project / "rounds/r0/sft/metrics.jsonl").exists())
        with dvc_is_locked(project):
            (project / "go").touch()
            time.sleep(DEFAULT_TIMEOUT + 2)

    other = threading.Thread(target=lock_for_longer_than_dvc_waits_by_default)
    other.start()
    outcome = dvc_stages.run("sft@r0", print)
    other.join()
    assert outcome == dvc_stages.Outcome.ran
    assert dvc_stages.run("sft@r0", print) == dvc_stages.Outcome.unchanged


def test_whether_a_stage_is_up_to_date_waits_for_dvc(project: Path) -> None:
    run_to("prepare@r0")
    other = threading.Timer(DEFAULT_TIMEOUT + 2, lambda: locked.__exit__(None, None, None))
    locked = dvc_is_locked(project)
    locked.__enter__()
    other.start()
    assert dvc_stages.up_to_date("prepare@r0")


def test_a_stage_can_resume_until_dvc_has_recorded_its_outputs(project: Path) -> None:
    states = [project / f".rondo/work/r0/sft/{run}/state.pt" for run in ("this", "killed-before")]
    for state in states:
        write_text(state, "update 7")
    set_params("sft.max_steps=3")
    with pytest.raises(RondoError):
        run_to("sft@r0")
    assert all(state.exists() for state in states)
    set_params("sft.max_steps=6")
    assert dvc_stages.run("sft@r0", print) == dvc_stages.Outcome.ran
    assert not any(state.parent.exists() for state in states)
    assert (project / ".rondo/work/r0/sft/clock.jsonl").exists()


def test_stages_get_the_settings_of_glibc_and_onednn_unless_the_user_has_set_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLIBC_TUNABLES", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    (tmp_path / "job.py").write_text(f"import os\nfor name in {names}: print(os.environ[name])\n")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    for own in ({}, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}):
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        assert dvc_stages.stream(["job"], lines.append) == 0
    assert lines == [dvc_stages.MALLOC, "64", dvc_stages.MALLOC, "8"]


def test_an_evaluation_whose_answers_were_deleted_runs_again(project: Path) -> None:
    """It is neither unchanged nor restored from DVC's cache of runs."""
    assert run_to("evaluate@r0") == dvc_stages.Outcome.ran
    AnswerCache(JUDGE_CACHE).table.close()
    record_answers("r0", has_answers=True)
    AnswerCache(JUDGE_CACHE).table.close()  # as the next stage that asks opens it
    assert dvc_stages.run("evaluate@r0", print) == dvc_stages.Outcome.unchanged
    assert dvc_stages.order_and_changes(["r0"])[1] == set()
    for answers in (None, AnswerCache):  # deleted; and begun again by another stage
        shutil.rmtree(JUDGE_CACHE, ignore_errors=True)
        if answers:
            answers(JUDGE_CACHE).table.close()
        assert dvc_stages.order_and_changes(["r0"])[1] == {"evaluate@r0"}
        lines: list[str] = []
        assert dvc_stages.run("evaluate@r0", lines.append) == dvc_stages.Outcome.ran
        assert "[evaluate@r0] step 3/3  eta 0:00" in lines
    record_answers("r0", has_answers=True)
    assert dvc_stages.run("evaluate@r0", print) == dvc_stages.Outcome.unchanged
    # a clone that has never asked takes the results as they are
    shutil.rmtree(JUDGE_CACHE)
    record_answers("r0", has_answers=False)
    assert dvc_stages.run("evaluate@r0", print) == dvc_stages.Outcome.unchanged
