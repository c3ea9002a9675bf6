"""For tests against real servers: ports, requests, and waiting for what takes its time."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def request(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    for _ in range(10):
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
            ) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 503:  # Prefect on sqlite asks to come again when it is busy
                raise
            time.sleep(1)
    raise AssertionError(f"{url} stays busy")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"ended without {text!r}:\n{output}")


def until(condition: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.2)


def of_project(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder."""
    processes = psutil.process_iter(["cmdline", "cwd"])
    return [
        process
        for process in processes
        if process.pid != os.getpid()
        and process.info["cwd"] == str(folder)
        and process.info["cmdline"]
    ]
