"""Run a stage as processes on a Ray cluster: submit them as a job, and print what they print.

The nodes need this project's folder and its .venv under the same paths. What the processes need
of the environment goes with the job, but no secrets: Ray's dashboard shows jobs to everybody, so
keys of judges and hubs are set on the nodes.
"""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TextIO

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_json, write_json, write_text
from stages.lib.core.launch import RUN_AGAIN, ended_by_signal
from stages.lib.core.ray.cluster import RayCluster
from stages.lib.core.ray.job import RayJob

DRIVER = Path(__file__).with_name("driver.py")
PLACES = "RONDO_RAY_PLACES"  # nodes and GPUs of the stage that starts a fresh process
SHOWN = 500  # characters of Ray's message, which ends with what the driver has printed last
PATIENCE_SECONDS = 300.0  # after which the processes end, if this one has; requests take up to 164
# Environment variables that change results, memory, or how processes reach each other
PASSED = (
    *("ATEN_", "CUBLAS_", "GLIBC_TUNABLES", "GLOO_", "HF_", "MKL_", "NCCL_", "NVIDIA_TF32"),
    *("OMP_", "ONEDNN_", "PYTHON", "PYTORCH_", "TORCH_"),
)
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


class Logs:
    """What the job and its processes have written, in files of their own; prints it once."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.streams: dict[Path, tuple[int, TextIO]] = {}
        for writer in ("job", *range(processes)):
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                path = folder / f"{writer}.{name}"
                write_text(path, "")
                self.streams[path] = (0, stream)

    def print(self, *, ended: bool = False) -> None:
        """Print the new whole lines, and at the end what is left of a line."""
        for path, (position, stream) in self.streams.items():
            with path.open("rb") as file:
                file.seek(position)
                lines, newline, rest = file.read().rpartition(b"\n")
            if newline:
                print(lines.decode(errors="replace"), file=stream, flush=True)
                self.streams[path] = (position + len(lines) + 1, stream)
            if ended and rest:
                print(rest.decode(errors="replace"), file=stream, flush=True)


def launch_on_cluster(
    dashboard: str, module: str, arguments: list[str], processes: int, address: str, folder: Path
) -> int:
    """Run `python -m module` as several processes on a Ray cluster, and wait for them.

    Args:
        dashboard: the cluster's `launcher.ray_address`.
        address: of the stage, e.g. `ppo@r0`.
        folder: for the files of the job; the nodes see it under the same path.

    Returns:
        0, or the exit code of the process that failed first.

    Raises:
        BadInput: the cluster has no room for so many.
        RondoError: a signal has ended one of them, or a node is lost.
        Unreachable: the cluster does not answer.
    """
    cluster, folder = RayCluster(dashboard), folder.resolve()
    job = RayJob(cluster, folder / "jobs.json", address)
    # of a command that was killed. It is not attached to: its outputs were deleted meanwhile
    job.end_last()
    alive, end, spec = (folder / name for name in ("alive", "end.json", "job.json"))
    end.unlink(missing_ok=True)
    logs = Logs(folder / "logs", processes)
    write_text(alive, "")
    write_json(
        spec,
        {
            "command": [sys.executable, "-m", module, *arguments],
            "folder": os.getcwd(),
            "environment": passed_environment(),
            "processes": processes,
            "places": json.loads(os.environ.get(PLACES, "null")),
            "logs": str(folder / "logs"),
            "alive": str(alive),
            "end": str(end),
            "patience": PATIENCE_SECONDS,
        },
    )

    starter = os.getppid() if PLACES in os.environ else None

    def look() -> bool:
        """Whether to stop the job: the stage that has started this process is gone."""
        alive.touch()
        logs.print()
        return starter is not None and os.getppid() != starter

    job.submit(lambda: f"python3 {shlex.quote(str(DRIVER))} {shlex.quote(str(spec))}")
    try:
        result = job.follow(look)
    finally:
        logs.print(ended=True)  # also if the cluster is lost
    job.record.unlink()  # only of a job that may still run is the cluster's address needed
    if result.status == "SUCCEEDED":
        return 0
    ended = read_json(end) if end.exists() else {}
    if (code := ended.get("code", 0)) < 0:
        raise ended_by_signal(ended["rank"], processes, signal.Signals(-code))
    if code:
        return int(code)
    if ended.get("bad_input"):
        raise BadInput(ended["reason"])
    reason = ended.get("reason") or result.message.strip().rstrip(".")[-SHOWN:]
    raise RondoError(
        f"the job {job.id} at {dashboard} ended as {result.status}: {reason}. Next: {RUN_AGAIN}"
    )


def passed_environment() -> dict[str, str]:
    """The variables of this process that go with the job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PASSED) and not any(word in name for word in SECRET)
    }
