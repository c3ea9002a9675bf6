"""Runs whose servers fail: the small project of tests/flows, whose stage `sft` waits in the middle
for the file `go`, and MLflow's server as a process of its own.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import requests

from flows.core.services import is_up
from tests.faults.projects import Ended, environment, rondo, wait_for_processes
from tests.servers import free_port, until


@dataclass(frozen=True)
class Started:
    """A command in a project, whose output goes to a file."""

    project: Path
    process: "subprocess.Popen[bytes]"
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def reaches(self, line: str) -> None:
        """Wait for a line of its output.

        Raises:
            AssertionError: it ends without it.
        """
        until(lambda: line in self.text() or self.process.poll() is not None)
        assert line in self.text(), self.text()

    def ended(self) -> Ended:
        """Wait until it has ended, and all processes of the project."""
        code = self.process.wait(600)
        wait_for_processes(self.project)
        return Ended(code, self.text())


def start(project: Path, *arguments: str, **variables: str) -> Started:
    """Start the command `rondo`."""
    names = iter(project.parent / f"{project.name}.{number}.log" for number in range(100))
    output = next(name for name in names if not name.exists())
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *rondo(*arguments)],
            cwd=project,
            env=environment(project) | variables,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    return Started(project, process, output)


def kill(*processes: psutil.Process) -> None:
    """SIGKILL of processes that all live until then."""
    assert processes and all(process.cmdline() for process in processes), "no victim"
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, 60)
    assert not any(map(psutil.Process.is_running, processes))


class MlflowServer:
    """MLflow's server, on a port that it keeps."""

    def __init__(self, folder: Path, tables: Path) -> None:
        """
        Args:
            folder: of its database and its artifacts.
            tables: a database without runs.
        """
        self.folder, self.port = folder, free_port()
        self.url, self.database = f"http://127.0.0.1:{self.port}", folder / "mlflow.db"
        self.processes: list[psutil.Process] = []
        shutil.copy(tables, self.database)

    def start(self) -> None:
        options = {
            "--backend-store-uri": f"sqlite:///{self.database}",
            "--artifacts-destination": str(self.folder / "mlartifacts"),
            "--host": "127.0.0.1",
            "--port": self.port,
            "--workers": "1",
        }
        command = [sys.executable, "-m", "mlflow", "server"]
        started = psutil.Popen(
            [*command, *(word for pair in options.items() for word in pair)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
        self.processes.append(started)
        until(lambda: is_up(f"{self.url}/health"))
        self.processes += started.children(recursive=True)

    def kill(self) -> None:
        """SIGKILL of all its processes."""
        processes, self.processes = self.processes, []
        kill(*processes)

    def hang(self) -> None:
        """It accepts connections, and answers none until `go_on`."""
        assert is_up(f"{self.url}/health")
        for process in self.processes:
            process.suspend()
        assert not is_up(f"{self.url}/health")

    def go_on(self) -> None:
        """It answers again, after `kill` or `hang`."""
        if not self.processes:
            self.start()
        for process in self.processes:
            process.resume()
        until(lambda: is_up(f"{self.url}/health"))


@contextmanager
def mlflow_server(folder: Path, tables: Path) -> Iterator[MlflowServer]:
    """A server that is not started yet, and has ended after the block."""
    server = MlflowServer(folder, tables)
    try:
        yield server
    finally:
        for process in server.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def refusing_proxy(target: str, refused: dict[str, tuple[int, str]]) -> Iterator[str]:
    """The address of a proxy in front of an HTTP server.

    Args:
        target: the server's address.
        refused: status and body of the answer to requests whose path contains a text; the others
            are passed on. It may change.
    """

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            refusals = [answer for text, answer in refused.items() if text in self.path]
            if refusals:
                [(status, answer)] = refusals
                kind, content = "text/html", answer.encode()
            else:
                passed = requests.request(
                    self.command,
                    target + self.path,
                    data=body,
                    headers={"Content-Type": "application/json"},
                    timeout=60,
                )
                status, content = passed.status_code, passed.content
                kind = passed.headers.get("Content-Type", "")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def prefect_server(home: Path, tables: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A Prefect server and the address of its API; it has ended after the block."""
    home.mkdir()
    shutil.copy(tables, home)
    port = free_port()
    server = psutil.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PREFECT_HOME": str(home)},
    )
    try:
        until(lambda: is_up(f"http://127.0.0.1:{port}/api/health"))
        yield server, f"http://127.0.0.1:{port}/api"
    finally:
        with suppress(psutil.NoSuchProcess):
            server.kill()
