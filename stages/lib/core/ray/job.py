"""The job of a stage on a Ray cluster: submitted once, followed, stopped with the stage."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn
from uuid import uuid4

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_json, write_json
from stages.lib.core.progress import print_line
from stages.lib.core.ray.cluster import Job, RayCluster

POLL_SECONDS = 2.0
# For up to half a minute after a node's death, Ray places jobs there. It says then that the actor
# of the job never ran, so that nothing of the job was done.
NEVER_RAN, TRIES, AGAIN_SECONDS = "never ran", 5, 10.0


class RayJob:
    """The last one of the jobs that are in a file, so that a killed stage finds it again.

    Args:
        cluster: where it runs.
        record: the file: the cluster's address, and the ids of all jobs of this run.
        address: of the stage, e.g. `ppo@r0`, for ids and messages.

    Raises:
        BadInput: the jobs are on another cluster.
    """

    def __init__(self, cluster: RayCluster, record: Path, address: str) -> None:
        self.cluster, self.record, self.address = cluster, record, address
        self.ids: list[str] = []
        self.command: Callable[[], str] | None = None
        self.tries = 0
        if record.exists():
            recorded = read_json(record, f"rm {record}")
            self.ids = recorded["jobs"]
            if recorded["address"] != cluster.address:
                raise BadInput(
                    f"{record}: this run's job {self.id} is on the Ray cluster at "
                    f"{recorded['address']}, but launcher.ray_address is {cluster.address}: set it "
                    f"back, or stop the job there and delete {record}"
                )

    @property
    def id(self) -> str:
        """Of the last job."""
        return self.ids[-1]

    def start(self, command: Callable[[], str]) -> None:
        """Attach to the last job if it runs or has succeeded; else submit the next one."""
        self.command = command
        job = self.cluster.job(self.id) if self.ids else None
        if job and (not job.ended or job.status == "SUCCEEDED"):
            self._print(f"attaches to the job {self.id}, {job.status}")
        else:
            self.submit(command)

    def submit(self, command: Callable[[], str]) -> None:
        """Submit the next job."""
        self.command, self.tries = command, self.tries + 1
        # a random id, since the same run in another folder may be on the cluster
        self.ids.append(f"rondo-{self.address.replace('@', '-')}-{uuid4().hex[:12]}")
        # before the job: a kill in between leaves an id that the cluster does not know
        write_json(self.record, {"address": self.cluster.address, "jobs": self.ids})
        self.cluster.submit(self.id, command())
        self._print(
            f"submitted the job {self.id} to Ray {self.cluster.version} at {self.cluster.address}"
        )

    def end_last(self) -> None:
        """Stop the last job, if it runs still, and wait for its end."""
        if self.ids and (job := self.cluster.job(self.id)) and not job.ended:
            self.follow(lambda: True)

    def follow(self, look: Callable[[], bool]) -> Job:
        """Wait for the end of the job; stop it if this process is told to end. A job that was
        placed on a node which had died is submitted again.

        Args:
            look: called every POLL_SECONDS, and once after the end; returns whether to stop the
                job.

        Raises:
            RondoError: the cluster does not know the job any more.
        """
        with _stopped_by_signals(self.stop):
            stopping = False
            while True:
                job = self.cluster.job(self.id)
                if job is None:
                    raise RondoError(
                        f"the Ray cluster at {self.cluster.address} does not know the job "
                        f"{self.id} any more: its head has been started anew. Next: run the stage "
                        "again, which continues from the last state that was saved"
                    )
                if look() and not (stopping or job.ended):
                    self.stop()
                    stopping = True
                if job.ended and not self._again(job):
                    return job
                time.sleep(POLL_SECONDS)

    def _again(self, job: Job) -> bool:
        """Submit a job again that never ran; whether that was done."""
        lost = job.status == "FAILED" and NEVER_RAN in job.message
        if not lost or self.command is None or self.tries == TRIES:
            return False
        self._print("the node of the job had died before the job began: submits it again")
        time.sleep(AGAIN_SECONDS)
        self.submit(self.command)
        return True

    def stop(self) -> None:
        """Have the cluster stop the job, which takes it seconds."""
        self._print(f"stops the job {self.id}")
        self.cluster.stop(self.id)

    def _print(self, text: str) -> None:
        print_line(f"[{self.address}] {text}")


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within this context SIGTERM and Ctrl-C call `stop`, and then end the process."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        stop()
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
