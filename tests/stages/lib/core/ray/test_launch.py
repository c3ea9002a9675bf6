"""What a stage on a Ray cluster prints and says of its end; its processes: ppo/test_ray.py."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_json
from stages.lib.core.params import SHARED, Params, check_params
from stages.lib.core.ray import job
from stages.lib.core.ray.cluster import RayCluster
from stages.lib.core.ray.job import RayJob
from stages.lib.core.ray.launch import DRIVER, Logs, launch_on_cluster, passed_environment
from tests.engine_settings import NEEDED
from tests.paths import ROOT
from tests.ray_stand_in import RayStandIn

# A program in the place of the driver's Python, which writes what the driver would
PYTHON = """#!{python}
import json, pathlib, sys, time
spec = json.loads(pathlib.Path(sys.argv[2]).read_text())
logs = pathlib.Path(spec["logs"])
(logs / "0.out").write_text("from the first\\n")
(logs / "1.err").write_text("from the second\\n")
pathlib.Path("spec.json").write_text(json.dumps(spec))
for _ in range(100):
    if pathlib.Path("printed").exists():
        break
    time.sleep(0.1)
else:
    sys.exit(3)
end = {end!r}
if end:
    pathlib.Path(spec["end"]).write_text(json.dumps(end))
sys.exit(bool(end))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "POLL_SECONDS", 0.05)
    return tmp_path / "job"


@pytest.fixture
def ray() -> Iterator[RayStandIn]:
    """Ray's stand-in, also where a real cluster is: the driver is another program."""
    server = RayStandIn({})
    yield server
    server.close()


def launch(ray: RayStandIn, folder: Path, end: dict[str, object]) -> int:
    """Launch two processes; the driver ends as `end` says."""
    program = folder.parent / "bin/python3"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PYTHON.format(python=sys.executable, end=end))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    ray.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    words = ["--round", "r0"]
    return launch_on_cluster(ray.address, "stages.ppo", words, 2, "ppo@r0", folder)


class Watched(StringIO):
    """A stream that makes a file when it has the first process's line."""

    def write(self, text: str) -> int:
        if text == "from the first":
            Path("printed").touch()
        return super().write(text)


def test_the_outputs_of_all_processes_are_printed_while_they_run(folder, ray, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    streams = Watched(), StringIO()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    assert launch(ray, folder, {}) == 0
    assert streams[0].getvalue().count("from the first\n") == 1
    assert streams[1].getvalue() == "from the second\n"
    spec = read_json(Path("spec.json"), "")
    assert spec["command"] == [sys.executable, "-m", "stages.ppo", "--round", "r0"]
    assert (spec["folder"], spec["processes"], spec["places"]) == (str(Path.cwd()), 2, None)
    assert not (folder / "jobs.json").exists()  # so that the next run may have another cluster
    assert spec["environment"]["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ({"reason": "", "rank": 1, "code": -9}, "process 2 of 2 was ended by SIGKILL"),
        ({"reason": "the node is lost"}, "ended as FAILED: the node is lost. Next: run the stage"),
    ],
)
def test_the_end_of_a_process_or_node_is_named(folder, ray, end, message):
    Path("printed").touch()
    with pytest.raises(RondoError, match=message):
        launch(ray, folder, end)


def test_a_cluster_without_room_is_bad_input(folder, ray):
    Path("printed").touch()
    reason = "launcher.processes is 2, but the cluster has room for 1"
    with pytest.raises(BadInput, match=f"^{reason}$"):
        launch(ray, folder, {"reason": reason, "bad_input": True})


@pytest.mark.parametrize("nested", [True, False])
def test_a_fresh_process_ends_its_job_if_the_stage_is_gone(folder, ray, monkeypatch, nested):
    """Evaluate's, when evaluate is stopped. A stage itself goes on if its terminal is gone."""
    if nested:
        monkeypatch.setenv("RONDO_RAY_PLACES", "[]")
    else:
        Path("printed").touch()
    parents = iter([7, 7])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    if nested:
        with pytest.raises(RondoError, match="ended as STOPPED"):
            launch(ray, folder, {})
    else:
        assert launch(ray, folder, {}) == 0


def test_a_python_without_ray_is_named(tmp_path):
    process = subprocess.run(
        [sys.executable, "-S", DRIVER, tmp_path / "job.json"], capture_output=True, text=True
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"{sys.executable}: No module named 'ray'; run `ray start`")


def test_the_exit_code_of_a_stage_stays_and_no_earlier_end_counts(folder, ray):
    Path("printed").touch()
    assert launch(ray, folder, {"reason": "", "rank": 0, "code": 2}) == 2
    assert launch(ray, folder, {}) == 0
    assert not (folder / "end.json").exists()


def test_the_job_of_a_command_that_was_killed_is_ended_first(folder, ray):
    Path("printed").touch()
    cluster = RayCluster(ray.address)
    killed = RayJob(cluster, folder / "jobs.json", "ppo@r0")
    killed.submit(lambda: "sleep 60")
    assert launch(ray, folder, {}) == 0
    ended = cluster.job(killed.id)
    assert ended and ended.status == "STOPPED"


def test_lines_are_printed_once_they_are_whole(tmp_path, capsys):
    logs = Logs(tmp_path, 1)
    out = tmp_path / "0.out"
    for text, printed in (("one\ntw", "one\n"), ("one\ntwo\nthree\n", "two\nthree\n")):
        out.write_text(text)
        logs.print()
        assert capsys.readouterr().out == printed
    out.write_text("one\ntwo\nthree\nfo")
    (tmp_path / "job.out").write_text("waits\n")
    logs.print(ended=True)
    assert capsys.readouterr().out == "waits\nfo\n"


def test_settings_go_with_the_job_and_secrets_do_not(monkeypatch):
    passed = {"HF_HOME", "PYTHONPATH", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "MKL_CBWR"}
    kept_here = {"HF_TOKEN", "MY_KEY", "RONDO_PYTHON", "CUDA_VISIBLE_DEVICES"}
    for name in passed | kept_here:
        monkeypatch.setenv(name, "x")
    assert passed <= passed_environment().keys()
    assert not kept_here & passed_environment().keys()


def on_ray(**ppo: object) -> Params:
    launcher = {"type": "ray", "ray_address": "http://ray:8265"}
    return check_params({"launcher": launcher, "ppo": ppo}, "test")


def test_the_stages_that_share_their_work_run_there():
    params = on_ray()
    stages = [stage for stage in (*SHARED, "annotate", "capability") if params.cluster(stage)]
    assert stages == list(SHARED)
    assert params.cluster("sft") == "http://ray:8265"
    assert not any(Params().cluster(stage) for stage in SHARED)
    engine = on_ray(**NEEDED | {"mini_batch_size": 32, "micro_batch_size": 4})
    assert [stage for stage in SHARED if not engine.cluster(stage)] == ["ppo"]
    with pytest.raises(BadInput, match=r"type ray: set launcher\.ray_address"):
        check_params({"launcher": {"type": "ray"}}, "test")


PROCESS = """from stages.lib.core.params import check_params
from stages.lib.core.processes import share_out

launcher = {"type": "ray", "ray_address": "http://127.0.0.1:9"}
share_out("stages.sft", [], check_params({"launcher": launcher}, ""), "sft", "r0")
print("goes on")
"""


@pytest.mark.parametrize(("rank", "printed"), [("0", "goes on\n"), ("1", "")])
def test_a_process_of_the_stage_goes_on(tmp_path, rank, printed):
    """Without asking the cluster; the second one prints nothing."""
    process = subprocess.run(
        [sys.executable, "-c", PROCESS],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "RONDO_AGENT": str(os.getpid()), "RANK": rank},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout) == (0, printed), process.stderr
    assert not list(tmp_path.iterdir())
