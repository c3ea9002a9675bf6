"""Time and memory of the commands and pages over many rounds, runs, checkpoints and rollouts.

`python -m bench.load [FOLDER]` makes the project of bench/load_project.py in FOLDER (default: a
temporary folder; minutes), or takes the one that is there, measures, and prints a Markdown table.
It exits with 1 if a target is missed. Seconds are medians of three. Memory is the peak of the
command's process. This process imports nothing large: Linux counts the memory of the process that
starts a command as the command's.
"""

import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Page, sync_playwright

from flows.core.services import WORKFLOW, Servers, last_servers
from tests.chromium import launch
from tests.servers import free_port, prefect_api, read_until, request

TRIES = 3
RUNS, STAGES = 100, 14  # of Prefect
LAST = "r29"
PAGE_SECONDS, STATUS_SECONDS = 1.0, 2.0
READ_MIB = 1024  # for a million rollouts
READ = f"from stages.replay.inputs import read_inputs; read_inputs({LAST!r}, 4)"
REPORT = Path("reports/report.html")


@dataclass(frozen=True)
class Row:
    """A line of the table. mib: peak, None if it is a server's. limits: seconds and MiB."""

    name: str
    seconds: float
    mib: float | None = None
    limits: tuple[float | None, float | None] = (None, None)

    @property
    def missed(self) -> bool:
        measured = zip((self.seconds, self.mib), self.limits, strict=True)
        return any(limit and (value or 0) > limit for value, limit in measured)

    def __str__(self) -> str:
        mib = "-" if self.mib is None else f"{self.mib:,.0f}"
        units = zip(self.limits, ("s", "MiB"), strict=True)
        wanted = ", ".join(f"{limit:g} {unit}" for limit, unit in units if limit) or "-"
        mark = " missed" if self.missed else ""
        return f"| {self.name} | {self.seconds:.2f} | {mib} | {wanted}{mark} |"


def run(folder: Path, arguments: list[str]) -> tuple[float, float]:
    """Seconds and peak MiB of a Python command in the project."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment(folder), stdout=subprocess.DEVNULL
    )
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    return time.monotonic() - start, usage.ru_maxrss / 1024


def environment(folder: Path) -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(folder), "PATH": path, "DVC_NO_ANALYTICS": "true"}


def command_row(
    folder: Path,
    name: str,
    arguments: list[str],
    limits: tuple[float | None, float | None] = (None, None),
) -> Row:
    tries = [run(folder, arguments) for _ in range(TRIES)]
    seconds, mib = (statistics.median(values) for values in zip(*tries, strict=True))
    return show(Row(name, seconds, mib, limits))


def page_row(name: str, load: Callable[[], Any]) -> Row:
    def seconds() -> float:
        start = time.monotonic()
        load()
        return time.monotonic() - start

    tries = [seconds() for _ in range(TRIES)]
    return show(Row(name, statistics.median(tries), limits=(PAGE_SECONDS, None)))


def show(row: Row) -> Row:
    print(row, flush=True)
    return row


def commands(folder: Path) -> Iterator[Row]:
    rondo = ["-m", "flows.cli"]
    yield command_row(folder, "`rondo status`", [*rondo, "status"], (STATUS_SECONDS, None))
    yield command_row(folder, "`dvc status`", ["-m", "dvc", "status"])
    yield command_row(folder, "`rondo report`", [*rondo, "report"])
    yield command_row(folder, "`rondo best`", [*rondo, "best", "--kl", "1000"])
    pair = ["compare", "load-000", "load-099"]
    yield command_row(folder, "`rondo compare`", [*rondo, *pair])
    yield command_row(folder, "replay reads its inputs", ["-c", READ], (None, READ_MIB))
    yield command_row(folder, "`rondo run`, nothing to do", [*rondo, "run"])


@contextmanager
def chromium() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser.new_page(viewport={"width": 1400, "height": 1000})
        browser.close()


def report_page(folder: Path) -> Iterator[Row]:
    size = (folder / REPORT).stat().st_size / 1e6
    with chromium() as page:
        name = f"the report in Chromium, {size:.1f} MB"
        yield page_row(name, lambda: page.goto((folder / REPORT).as_uri()))


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """`rondo up`, ready."""
    ports = {"PREFECT_SERVER_API_PORT": free_port(), "MLFLOW_PORT": free_port()}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "up"],
        cwd=folder,
        env=environment(folder) | ports,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        read_until(process, "Ctrl-C")
        yield last_servers(folder / ".rondo")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def add_flow_runs(api: str) -> None:
    """Completed runs with a task per stage in Prefect, up to RUNS."""
    flow = request(f"{api}/flows/", {"name": "rlhf-pipeline"})["id"]
    done = {"type": "COMPLETED", "name": "Completed"}
    for number in range(request(f"{api}/flow_runs/count", {}), RUNS):
        flow_run = {"flow_id": flow, "name": f"load {number}", "state": done}
        run_id = request(f"{api}/flow_runs/", flow_run)["id"]
        for stage in range(STAGES):
            task = {"flow_run_id": run_id, "task_key": "stage", "dynamic_key": str(stage)}
            request(f"{api}/task_runs/", task | {"state": done})


def server_rows(folder: Path) -> Iterator[Row]:
    """The requests with which pages list runs and models, then these pages in a browser."""
    with servers(folder) as up:
        prefect, mlflow = prefect_api(folder), f"{up.mlflow}/api/2.0/mlflow"
        add_flow_runs(prefect)
        rondo = request(f"{mlflow}/experiments/get-by-name?experiment_name=rondo")["experiment"]
        experiment = rondo["experiment_id"]
        yield from api_rows(prefect, mlflow, experiment)
        with chromium() as page:
            page.goto(up.login)
            page.wait_for_url(f"{up.prefect}/deployments")
            pages = f"{up.mlflow}/#/experiments/{experiment}"
            for name, url, text in (
                ("Prefect's page of runs", f"{up.prefect}/runs", "load 99"),
                ("MLflow's page of runs", f"{pages}/runs?{WORKFLOW}", "load-099"),
                ("MLflow's page of models", f"{pages}/models?{WORKFLOW}", f"{LAST}-step_01000"),
            ):
                yield browser_row(f"{name} in Chromium", page, url, text)


def api_rows(prefect: str, mlflow: str, experiment: str) -> Iterator[Row]:
    newest = {"sort": "START_TIME_DESC", "limit": RUNS}
    yield page_row(
        "Prefect's API: a page of 100 runs",
        lambda: request(f"{prefect}/flow_runs/paginate", newest),
    )
    search = {"experiment_ids": [experiment], "max_results": RUNS}
    search |= {"filter": "tags.`rondo.address` = 'pipeline'"}
    yield page_row(
        "MLflow's API: a page of 100 runs", lambda: request(f"{mlflow}/runs/search", search)
    )
    models = {"experiment_ids": [experiment], "max_results": 50}
    yield page_row(
        "MLflow's API: a page of 50 models",
        lambda: request(f"{mlflow}/logged-models/search", models),
    )


def browser_row(name: str, page: Page, url: str, text: str) -> Row:
    """Until a text of the list is visible. The first try fills the browser's cache."""

    def load() -> None:
        page.goto("about:blank")  # MLflow's pages have one address but for what follows "#"
        page.goto(url, wait_until="commit")
        page.get_by_text(text).first.wait_for()

    return page_row(name, load)


def main(folder: Path) -> int:
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "bench.load_project", str(folder)], check=True)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}\n")
    print("| | seconds | MiB | at most |\n|---|---:|---:|---|", flush=True)
    rows = [*commands(folder), *report_page(folder), *server_rows(folder)]
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    with TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary) / "project"))
