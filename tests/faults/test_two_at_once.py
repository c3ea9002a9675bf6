"""Two commands at once in one project: the second waits, or is refused with a typed error, and both
end with the results of one.
"""

import multiprocessing
import shutil
from contextlib import chdir
from multiprocessing.synchronize import Barrier
from pathlib import Path

from flows.commands import badcases
from stages.replay.badcases import Report, read_user_rows
from tests.faults.projects import RUN, States, copy, differences, wait_for_processes
from tests.faults.servers import start
from tests.paths import ROOT
from tests.servers import rondo

OFF = {"MLFLOW_TRACKING_URI": "off"}


def test_two_runs_and_other_commands_in_one_folder(states: States, tmp_path: Path) -> None:
    state = states("small", "one round")
    project = copy(state.before, tmp_path / "project")
    (project / "go").unlink()
    one = start(project, *RUN, **OFF)
    one.reaches("[sft@r0] step 3/3")
    other = start(project, *RUN, **OFF)
    other.reaches("another run is using this folder")
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
    wait_for_processes(project)
    assert "[sft@r0] ran" in one.text(), one.text()
    assert "[sft@r0] unchanged" in other.text(), other.text()
    reports = project / "badcases/r0.jsonl"
    assert reports.read_text().count('"rude"') == 1
    reports.write_text("")  # as the run without it leaves the file
    assert not differences(project, state.after)


def add_rows(number: int, ready: Barrier) -> None:
    """Add rows one by one, at the same time as others do."""
    for row in range(20):
        ready.wait(300)
        text = f"{number}-{row}"
        try:
            badcases.keep([("the prompt", Report(prompt=text, response=text, by="Ada"))], "r0")
        except OSError:
            ready.abort()  # else the others wait for this person
            raise


def test_no_report_is_lost_if_several_are_added_at_once(tmp_path: Path) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    with chdir(tmp_path):
        context = multiprocessing.get_context("spawn")  # pytest has threads: no fork
        ready = context.Barrier(4)
        people = [context.Process(target=add_rows, args=(number, ready)) for number in range(4)]
        for person in people:
            person.start()
        for person in people:
            person.join(600)
        assert [person.exitcode for person in people] == [0] * 4
        assert len(list(read_user_rows("r0"))) == 80
