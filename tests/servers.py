"""For tests against real servers: ports, requests, and waiting for what takes its time."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from flows.core.services import last_servers
from tests.paths import ROOT

NOWHERE = "http://127.0.0.1:9"  # no server listens there


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def prefect_api(project: Path) -> str:
    """The address of the API of `rondo up` in this folder, with user and password."""
    servers = last_servers(project / ".rondo")
    return f"{servers.prefect}/api".replace("//", f"//{servers.auth}@")


def request(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """The answer to a request; user and password of the address go into its header."""
    data = None if body is None else json.dumps(body).encode()
    headers, parts = {"Content-Type": "application/json"}, urlsplit(url)
    if "@" in parts.netloc:
        auth, _, host = parts.netloc.rpartition("@")
        headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        url = parts._replace(netloc=host).geturl()
    for _ in range(10):
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers, method=method), timeout=60
            ) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 503:  # Prefect on sqlite asks to come again when it is busy
                raise
            time.sleep(1)
    raise AssertionError(f"{url} stays busy")


def start_rondo(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """The command `rondo` with these arguments in a folder, with additional variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rondo(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command of `start_rondo` when it has ended."""
    with start_rondo(folder, *arguments, **environment) as process:
        stdout, stderr = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"ended without {text!r}:\n{output}")


def until(condition: Any, seconds: float = 300, pause: float = 0.2) -> None:
    """Waits for a condition that is checked after each pause, in seconds: a long one if the check
    takes CPU from what it waits for.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(pause)


def of_project(folder: Path, *words: str) -> list[psutil.Process]:
    """The processes that work in a folder, or in a folder of it, and have these words in their
    command lines.
    """
    processes = psutil.process_iter(["cmdline", "cwd"])
    return [
        process
        for process in processes
        if process.pid != os.getpid()
        and Path(process.info["cwd"] or "").is_relative_to(folder)
        and process.info["cmdline"]
        and {*words} <= {*process.info["cmdline"]}
    ]
