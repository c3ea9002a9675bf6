"""The number of stages that compute at the same time: Prefect's global concurrency limit
`rondo-compute`, or `rondo-compute-NAME` on the machine of a `rondo worker`; 1 unless a person
changed it.

Concurrent runs, each in its own workspace, take turns stage by stage; a stage that one run computed
is in DVC's cache for the others. A run without a Prefect server (`rondo run` alone) does not wait.
With several GPUs, each slot has one, or one per process of the stage.

A slot is a lease of Prefect's. Prefect's own context manager stops renewing it after three failed
tries, within seconds, and the stage goes on without a slot; a `Slot` is taken again.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from http import HTTPStatus
from threading import Event, Thread
from uuid import UUID

from httpx import HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import get_current_settings

from flows.core.services import WORKER, LogLine
from flows.execution import gpus
from flows.orchestration.prefect_requests import prefect_client
from stages.lib.core.errors import RondoError
from stages.lib.core.progress import progress

LIMIT = "rondo-compute"
LEASE_SECONDS = 60.0  # Prefect's minimum; a killed run keeps its slot for this long
RENEW_SECONDS = 20.0  # between two renewals
WAIT_SECONDS = 2.0  # between two tries to take a slot
RELEASE_SECONDS = 3.0  # for Prefect to answer; a lease that is not released runs out


@contextmanager
def compute_slot(log: LogLine, processes: int = 1) -> Iterator[None]:
    """Wait for a slot, then hold it, with a GPU for each of the stage's processes."""
    if not get_current_settings().api.url:
        with gpus.some_gpus(processes):
            yield
        return
    slot = Slot(log)
    try:
        slot.wait()
    except RondoError as error:
        log(f"computing without a slot of {slot.limit} until Prefect answers ({error})")
    with slot.held(), gpus.some_gpus(processes):
        yield


def limit_name() -> str:
    """The limit of this machine."""
    return "-".join(filter(None, [LIMIT, os.environ.get(WORKER)]))


class Slot:
    """One of the slots of this machine's limit."""

    def __init__(self, log: LogLine) -> None:
        self.log, self.limit = log, limit_name()
        self.lease: UUID | None = None
        self.released = Event()

    def wait(self) -> None:
        """Take a slot as soon as one is free.

        Raises:
            RondoError: Prefect does not answer.
        """
        with prefect_client() as client:
            with suppress(ObjectAlreadyExists):
                client.create_global_concurrency_limit(
                    GlobalConcurrencyLimitCreate(name=self.limit, limit=1)
                )
            if self._take(client):
                return
            limit = client.read_global_concurrency_limit_by_name(self.limit)
        self.log(
            f"waiting: other runs use {limit.active_slots} of {limit.limit} slots of {self.limit} "
            "(see Concurrency in the Prefect UI)"
        )
        with progress(f"waiting for a slot of {self.limit}"):
            while not self.lease:  # also in an outage: the others compute
                time.sleep(WAIT_SECONDS)
                with suppress(RondoError), prefect_client() as client:
                    self._take(client)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the slot during the block, then give it back."""
        # Prefect's settings and the logger of the flow run are in the context
        thread = Thread(target=copy_context().run, args=[self._keep], daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.released.set()
            thread.join(RELEASE_SECONDS)

    def _keep(self) -> None:
        """Renew the lease until the slot is released; after an outage, take a slot again."""
        while not self.released.wait(RENEW_SECONDS):
            with suppress(RondoError), prefect_client() as client:
                self._renew(client)
        if self.lease:
            with suppress(RondoError), prefect_client() as client:
                client.release_concurrency_slots_with_lease(self.lease)

    def _renew(self, client: SyncPrefectClient) -> None:
        if self.lease:
            try:
                client.renew_concurrency_lease(self.lease, LEASE_SECONDS)
                return
            except HTTPStatusError as error:
                if error.response.status_code != HTTPStatus.GONE:
                    raise
            self.lease = None
            self.log(f"Prefect lost the slot of {self.limit}, e.g. in an outage: taking it again")
        if self._take(client):
            self.log(f"has a slot of {self.limit} again")

    def _take(self, client: SyncPrefectClient) -> bool:
        """Take a slot if one is free."""
        try:
            response = client.increment_concurrency_slots_with_lease(
                [self.limit], 1, "concurrency", LEASE_SECONDS
            )
        except HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.LOCKED:
                raise
            return False
        self.lease = UUID(response.json()["lease_id"])
        return True
