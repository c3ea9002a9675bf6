"""Two commands at once in one project: the second waits, or is refused with a typed error, and both
end with the results of one.
"""

import multiprocessing
import subprocess
import sys
from contextlib import chdir, nullcontext
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from flows.commands import badcases
from stages.replay.badcases import Report as Badcase
from stages.replay.badcases import read_user_rows
from tests.faults.conftest import Report
from tests.faults.lab import Ended, copy
from tests.faults.scale import FULL
from tests.faults.servers import WAITING_RUN, in_sft, rondo_up, start, trial_of
from tests.faults.test_run_kills import check_records
from tests.flows.test_up import finished, with_the_flow
from tests.flows.test_up import start as start_from_the_form
from tests.servers import prefect_api, request, rondo, until

WAITS = "another run is using this folder"
pytestmark = pytest.mark.usefixtures("fast_processes")
OFF = {"MLFLOW_TRACKING_URI": "off"}
full = pytest.mark.skipif(not FULL, reason="minutes: make test-faults")


def test_two_runs_and_other_commands_in_one_folder(
    undisturbed: Path, tmp_path: Path, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    one = start(project, *WAITING_RUN, **OFF)
    one.reaches("[sft@r0] step 3/3")
    other = start(project, *WAITING_RUN, **OFF)
    other.reaches(WAITS)
    gc = rondo(project, "gc", "--cache", **OFF)
    assert gc.returncode == 2 and "BadInput: a run is running" in gc.stderr, gc.stderr
    gc = rondo(project, "gc", "--older-than", "0", **OFF)
    assert gc.returncode == 0 and "the resume states stay" in gc.stdout, gc.stderr
    flag = ("badcases", "flag", "--prompt", "Hi", "--response", "No", "--note", "rude")
    flagged = rondo(project, *flag, "--by", "Ada", **OFF)
    assert flagged.returncode == 0 and "1 added" in flagged.stdout, flagged.stderr
    status = rondo(project, "status", **OFF)
    assert "runs: step 3" in status.stdout, status
    assert "[sft@r0]" not in other.text()
    (project / "go").touch()
    assert [run.process.wait(600) for run in (one, other)] == [0, 0], other.text()
    first, second = one.ended("run"), other.ended()
    assert "[sft@r0] ran" in first.output, first.output
    assert "[sft@r0] unchanged" in second.output, second.output
    reports = project / "badcases/r0.jsonl"
    assert reports.read_text().count('"rude"') == 1
    reports.write_text("")  # as the run without it leaves the file
    trial = trial_of("two runs", first, second, project, undisturbed / "after")
    report("two runs at once: one folder", [trial])


def add_rows(number: int, ready: Barrier, locks: bool) -> None:
    """Add rows one by one, at the same time as others do. No locks: the planted bug."""
    if not locks:
        badcases.FileLock = nullcontext  # type: ignore[assignment, misc]
    for row in range(20):
        ready.wait(60)
        text = f"{number}-{row}"
        try:
            badcases.keep([("the prompt", Badcase(prompt=text, response=text, by="Ada"))], "r0")
        except OSError:
            ready.abort()  # else the others wait for this person
            raise


def check_reports_of_four(project: Path, locks: bool) -> None:
    """Four people add 20 rows each, and all are there."""
    with chdir(project):
        context = multiprocessing.get_context("spawn")  # pytest has threads: no fork
        ready = context.Barrier(4)
        people = [
            context.Process(target=add_rows, args=(number, ready, locks)) for number in range(4)
        ]
        for person in people:
            person.start()
        for person in people:
            person.join(120)
        assert [person.exitcode for person in people] == [0] * 4
        assert len(list(read_user_rows("r0"))) == 80


def test_no_report_is_lost_if_several_are_added_at_once(undisturbed: Path, tmp_path: Path) -> None:
    check_reports_of_four(copy(undisturbed / "before", tmp_path / "project"), True)


@full
def test_a_skipped_lock_is_seen(undisturbed: Path, tmp_path: Path) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    with pytest.raises(AssertionError):
        check_reports_of_four(project, False)


@full
def test_two_clones_with_one_cache_of_dvc(
    undisturbed: Path, tmp_path: Path, report: Report
) -> None:
    projects = [copy(undisturbed / "before", tmp_path / name) for name in ("one", "other")]
    for project in projects:
        command = [sys.executable, "-m", "dvc", "cache", "dir", "--local", str(tmp_path / "cache")]
        subprocess.run(command, cwd=project, check=True)
        (project / "go").touch()
    runs = [start(project, *WAITING_RUN, **OFF) for project in projects]
    for run in runs:
        none = Ended(0, "", "two runs")  # neither follows the other
        trial = trial_of("two clones", none, run.ended(), run.project, undisturbed / "after")
        report("two runs at once: two clones with one cache", [trial])
    assert (tmp_path / "cache/files/md5").exists()
    for project in projects:
        status = rondo(project, "status", **OFF)
        assert "to do" not in status.stdout, status


@full
def test_a_run_of_the_terminal_beside_one_of_the_worker(
    undisturbed: Path, tmp_path: Path, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    environment = with_the_flow(project)
    with rondo_up(project, environment):
        api = prefect_api(project)
        pipeline = request(f"{api}/deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]
        run = start_from_the_form(api, pipeline, "sft.max_steps=51")
        until(lambda: in_sft(project))
        other = start(project, *WAITING_RUN)
        other.reaches(WAITS)
        (project / "go").touch()
        assert finished(api, run) == "Completed"
        assert other.process.wait(300) == 0, other.text()
    second = other.ended("run")
    assert "[sft@r0] unchanged" in second.output, second.output
    trial = trial_of("terminal and worker", second, second, project, undisturbed / "after")
    report("two runs at once: terminal and worker", [trial])


@full
def test_ten_queued_runs(undisturbed: Path, tmp_path: Path, report: Report) -> None:
    """One of them computes, and the others find its results."""
    project = copy(undisturbed / "before", tmp_path / "project")
    with rondo_up(project, with_the_flow(project)):
        api = prefect_api(project)
        pipeline = request(f"{api}/deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]
        runs = [start_from_the_form(api, pipeline, "sft.max_steps=51") for _ in range(10)]
        until(lambda: in_sft(project))
        (project / "go").touch()
        assert [finished(api, run) for run in runs] == ["Completed"] * len(runs)
    none = Ended(0, "", "ten runs")
    report("ten queued runs", [trial_of("ten runs", none, none, project, undisturbed / "after")])
    check_records(project)
