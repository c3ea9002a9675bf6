"""Starts the processes of a stage on the nodes of a Ray cluster, and waits for them.

It is the program of a Ray job (stages/lib/core/ray/launch.py), and runs in Ray's environment, which
need not have Rondo's packages: it imports Ray alone. Each process has the place of a Ray actor and
is a child of it. If one ends, all end, and so they do if the actor or this program ends, or if the
command that submitted the job does not touch a file any more.

Run: python3 driver.py job.json
"""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    sys.exit(
        f"{sys.executable}: {error}; run `ray start` where `python3` is that of Ray's environment "
        "(docs/scale.md)"
    )

Job = dict[str, Any]  # job.json
SECONDS = 1.0  # between two looks at the processes
GPUS = "CUDA_VISIBLE_DEVICES"
OF_RAY = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")  # set for Ray's own environment


class Worker:
    """One process of the stage."""

    def place(self) -> tuple[str, str, str]:
        """Its node's id, its node's address, and the GPUs that Ray has given it."""
        context = ray.get_runtime_context()
        # not from the environment: Ray can be told not to set it
        gpus = ",".join(context.get_accelerator_ids().get("GPU", []))
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus

    def free_port(self) -> int:
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def start(
        self, command: list[str], folder: str, environment: dict[str, str], output: str, errors: str
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in OF_RAY}
        # network interfaces have other names on each node
        own = {name: value for name, value in kept.items() if name.endswith("_SOCKET_IFNAME")}
        with open(output, "ab") as stdout, open(errors, "ab") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**kept, **environment, **own, "RONDO_AGENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def exit_code(self) -> int | None:
        return self.process.poll()


Actor: Any = ray.remote(Worker)


class Alive:
    """Whether the command that submitted the job still touches its file."""

    def __init__(self, job: Job) -> None:
        self.job, self.touched, self.since = job, 0, time.monotonic()

    def check(self) -> None:
        """End the job if the file was not touched for long. No clock of another machine counts."""
        now = os.stat(self.job["alive"]).st_mtime_ns
        if now != self.touched:
            self.touched, self.since = now, time.monotonic()
        elif time.monotonic() - self.since > self.job["patience"]:
            end(self.job, "the command that submitted the job has ended")


def make_workers(job: Job) -> list[Any]:
    """An actor per process: where the job says, or else wherever the cluster has room."""
    if job["places"]:  # a fresh process of a stage, which holds the resources itself
        return [
            Actor.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node, _ in job["places"]
        ]
    count, nodes = job["processes"], [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needed = resources(count, nodes)
    room = sum(
        min(int(node.get(name, 0) // number) for name, number in needed.items()) for node in nodes
    )
    if room < count:
        end(
            job,
            f"launcher.processes is {count}, but the cluster has room for {room} with {needed}: "
            "lower it, or add nodes",
            bad_input=True,
        )
    group, alive = placement_group([needed] * count, strategy="PACK"), Alive(job)
    if not group.wait(10):
        with open(os.path.join(job["logs"], "job.out"), "a", encoding="utf-8") as log:
            print(f"waits for {count} times {needed}, which others use", file=log)
        while not group.wait(SECONDS):
            alive.check()
    return [
        Actor.options(
            num_cpus=needed["CPU"],
            num_gpus=needed.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(count)
    ]


def resources(count: int, nodes: list[dict[str, float]]) -> dict[str, int]:
    """Of one process: a GPU if there are any, else its part of the cores."""
    if any(node.get("GPU") for node in nodes):
        return {"GPU": 1, "CPU": 1}
    cores = [int(node["CPU"]) for node in nodes if node.get("CPU")] or [1]
    return {"CPU": max(min(cores) // -(-count // len(cores)), 1)}


def start(job: Job, workers: list[Any]) -> list[Any]:
    """Start the processes; those of one node have consecutive ranks, and the head, where this
    program runs, has the first ones if it has any: a stage's first process asks its dashboard.
    """
    given = ray.get([worker.place.remote() for worker in workers])
    head = ray.get_runtime_context().get_node_id()
    first = head if head in [node for node, *_ in given] else given[0][0]
    order = sorted(range(len(workers)), key=lambda index: (given[index][0] != first, given[index]))
    workers, given = [workers[index] for index in order], [given[index] for index in order]
    kept = job["places"] or [(node, gpus) for node, _, gpus in given]
    nodes = [node for node, _ in kept]
    cores = {node["NodeID"]: node["Resources"].get("CPU", 1) for node in ray.nodes()}
    # as many in each process, and in a fresh one: another number may round otherwise
    threads = max(int(min(cores[node] // nodes.count(node) for node in nodes)), 1)
    common = {
        "OMP_NUM_THREADS": str(threads),
        **job["environment"],
        "WORLD_SIZE": str(len(workers)),
        "LOCAL_RANK": "0",  # a process sees no GPU but its own
        "MASTER_ADDR": given[0][1],
        "MASTER_PORT": str(ray.get(workers[0].free_port.remote())),
        "RONDO_RAY_PLACES": json.dumps(kept),
    }
    for rank, (worker, (_, gpus)) in enumerate(zip(workers, kept, strict=True)):
        own = {"RANK": str(rank), GPUS: gpus}
        logs = [os.path.join(job["logs"], f"{rank}.{name}") for name in ("out", "err")]
        ray.get(worker.start.remote(job["command"], job["folder"], {**common, **own}, *logs))
    return workers


def wait(job: Job, workers: list[Any]) -> None:
    """Wait until all processes have succeeded, or one has failed."""
    alive = Alive(job)
    codes = [None] * len(workers)
    while any(code is None for code in codes):
        time.sleep(SECONDS)
        for rank, worker in enumerate(workers):
            try:
                codes[rank] = ray.get(worker.exit_code.remote())
            except RayError as error:
                end(job, f"process {rank + 1} of {len(workers)} is lost, or its node: {error}")
            if codes[rank]:
                end(job, "", rank=rank, code=codes[rank])
        alive.check()


def end(job: Job, reason: str, **more: int) -> NoReturn:
    """Say why the job fails, and end it, and with it the actors and processes."""
    with open(job["end"] + ".new", "w", encoding="utf-8") as stream:
        json.dump({"reason": reason, **more}, stream)
    os.replace(job["end"] + ".new", job["end"])
    sys.exit(reason or "a process has failed")


def main(path: str) -> None:
    with open(path, encoding="utf-8") as stream:
        job = json.load(stream)
    ray.init(address="auto", log_to_driver=False)
    wait(job, start(job, make_workers(job)))


if __name__ == "__main__":
    main(sys.argv[1])
