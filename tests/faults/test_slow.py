"""A slow disk, and servers that answer late, during a whole run: its results are the same, and
MLflow has all records at its end.
"""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.conftest import RUN, Report
from tests.faults.lab import INJECTION, Ended, copy
from tests.faults.scale import FULL
from tests.faults.servers import MlflowServer, prefect_server, slow_proxy, start, trial_of
from tests.faults.test_run_kills import check_records

pytestmark = [
    pytest.mark.usefixtures("fast_processes"),
    pytest.mark.skipif(not FULL, reason="minutes: make test-faults"),
]


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    return copy(finished / "before", tmp_path / "project")


def test_a_slow_disk(project: Path, finished: Path, tmp_path: Path, report: Report) -> None:
    """Each fsync takes 20 ms longer, of SQLite as well."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("a slow disk needs a C compiler, `cc`")
    library, fsyncs = tmp_path / "slow_disk.so", tmp_path / "fsyncs"
    source = INJECTION / "slow_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    fsyncs.touch()
    first = start(project, *RUN, LD_PRELOAD=str(library), SLOW_DISK=str(fsyncs)).ended()
    check_slow(first, project, finished, fsyncs.stat().st_size, report)
    check_records(project)


def test_mlflow_answers_late(
    project: Path, finished: Path, server: MlflowServer, report: Report
) -> None:
    server.start()
    with slow_proxy(server.port, 0.1) as proxy:
        first = start(project, *RUN, MLFLOW_TRACKING_URI=proxy.url).ended()
    check_slow(first, project, finished, proxy.delayed, report)
    check_records(project, server.database)


def test_prefect_answers_late(
    project: Path, finished: Path, tmp_path: Path, prefect_tables: Path, report: Report
) -> None:
    with (
        prefect_server(tmp_path / "prefect", prefect_tables) as (_, api),
        slow_proxy(str(urlsplit(api).port), 0.1) as proxy,
    ):
        environment = {"PREFECT_API_URL": f"{proxy.url}/api", "MLFLOW_TRACKING_URI": "off"}
        first = start(project, *RUN, **environment).ended()
        check_slow(first, project, finished, proxy.delayed, report)


def check_slow(first: Ended, project: Path, finished: Path, delayed: int, report: Report) -> None:
    """The run went well the first time, though something was slow, and lost nothing."""
    assert first.code == 0 and "MLflow is missing" not in first.output, first.output
    assert delayed > 20
    second = start(project, *RUN, MLFLOW_TRACKING_URI="off").ended()
    assert "to do: nothing" in second.output, second.output
    struck = replace(first, struck=f"{delayed} times")
    trial = trial_of("slow", struck, second, project, finished / "after")
    report("a slow disk, slow servers in a run", [trial])
