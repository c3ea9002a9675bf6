"""A real Ray cluster of this machine's processes, for `make test-engines`: RAY_TEST names Ray's
programs.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.ray_stand_in import RayStandIn
from tests.servers import free_port, until

PROGRAMS = os.environ.get("RAY_TEST", "")
needs_ray = pytest.mark.skipif(not PROGRAMS, reason="needs Ray: make test-engines")


class RealCluster:
    """A head; `start_node` adds nodes. Each has `cpus` CPUs and no GPU.

    Attributes:
        address: of the dashboard; a head that is started anew has the same.
    """

    def __init__(self, cpus: int, environment: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # paths of sockets have to be short
        self.cpus, self.environment = cpus, environment
        self.port, self.dashboard = free_port(), free_port()
        self.address = f"http://127.0.0.1:{self.dashboard}"
        self.nodes: list[psutil.Process] = []
        self.start_head()

    def start_head(self) -> psutil.Process:
        where = ["--dashboard-host", "127.0.0.1", "--dashboard-port", self.dashboard]
        return self._start("--head", "--port", self.port, "--temp-dir", str(self.folder), *where)

    def start_node(self) -> psutil.Process:
        return self._start("--address", f"127.0.0.1:{self.port}")

    def _start(self, *arguments: str) -> psutil.Process:
        before = self.alive()
        ports = ["--dashboard-agent-listen-port", free_port()]
        ports += ["--dashboard-agent-grpc-port", free_port()]
        with (self.folder / "log").open("ab") as log:
            node = subprocess.Popen(
                [
                    *(f"{PROGRAMS}/ray", "start", "--block", *arguments, *ports),
                    *("--num-cpus", str(self.cpus), "--num-gpus", "0", "--disable-usage-stats"),
                    *("--object-store-memory", "100000000"),
                ],
                env=os.environ
                | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
                | self.environment,
                stdout=log,
                stderr=log,
            )
        self.nodes.append(psutil.Process(node.pid))
        until(lambda: self.alive() - before, 120)
        return self.nodes[-1]

    def alive(self) -> set[str]:
        """Ids of the nodes that are alive, which a node is for seconds after its end; none without
        a head.
        """
        try:
            answer = requests.get(f"{self.address}/nodes?view=summary", timeout=10).json()
        except (requests.RequestException, ValueError):
            return set()
        nodes: list[dict[str, Any]] = answer["data"]["summary"]
        return {
            node["raylet"]["nodeId"] for node in nodes if node["raylet"].get("state") == "ALIVE"
        }

    def kill(self, node: psutil.Process) -> None:
        """Kill all processes of a node at once, but not what its workers have started."""
        everything = [node, *node.children(recursive=True)]
        own = [process for process in everything if not is_of_stage(process)]
        for process in own:
            process.kill()
        psutil.wait_procs(own, timeout=20)
        self.nodes.remove(node)

    def close(self) -> None:
        for node in list(self.nodes):
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_real(environment: dict[str, str]) -> Iterator[RealCluster | None]:
    """For a fixture: a real cluster with these variables, if there is Ray."""
    cluster = RealCluster(2, environment) if PROGRAMS else None
    yield cluster
    if cluster:
        cluster.close()


def real_or_stand_in(
    real: RealCluster | None, environment: dict[str, str]
) -> Iterator[RealCluster | RayStandIn]:
    """For a fixture: the real cluster, or a stand-in of the test's own, with these variables."""
    stand_in = None if real else RayStandIn(dict(environment))
    yield real or stand_in  # type: ignore[misc]
    if stand_in:
        stand_in.close()


def is_of_stage(process: psutil.Process) -> bool:
    try:
        return "-m stages." in " ".join(process.cmdline())
    except psutil.Error:
        return False


def stage_processes(cluster: RealCluster) -> list[tuple[psutil.Process, psutil.Process]]:
    """The processes of stages on the cluster, each with its node, in the order of their ranks."""
    running = [
        (child, node)
        for node in cluster.nodes
        for child in node.children(recursive=True)
        if is_of_stage(child)
    ]
    return sorted(running, key=lambda pair: int(pair[0].environ()["RANK"]))
