"""The number of stages that compute at the same time: Prefect's global concurrency limit
`rondo-compute`, or `rondo-compute-NAME` on the machine of a `rondo worker`; 1 unless a person
changed it.

Concurrent runs, each in its own workspace, take turns stage by stage; a stage that one run computed
is in DVC's cache for the others. A run with a Prefect server of its own (`rondo run` alone) does
not wait. With several GPUs, each slot has one, or one per process of the stage.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from httpx import HTTPError
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, PrefectException
from prefect.settings import get_current_settings

from flows.core.services import WORKER, LogLine
from flows.execution import gpus
from flows.orchestration.prefect_requests import prefect_client
from stages.lib.core.errors import RondoError
from stages.lib.core.progress import progress

LIMIT = "rondo-compute"
LEASE_SECONDS = 60.0  # Prefect's minimum; a killed run keeps its slot for this long


def limit_name() -> str:
    """The limit of this machine."""
    return "-".join(filter(None, [LIMIT, os.environ.get(WORKER)]))


@contextmanager
def compute_slot(log: LogLine, processes: int = 1) -> Iterator[None]:
    """Wait for a slot, then hold it, with a GPU for each of the stage's processes.

    If Prefect does not answer, the stage computes without a slot.
    """
    settings, slot = get_current_settings(), ExitStack()
    if settings.api.url and not settings.server.ephemeral.enabled:
        try:
            waiting = f"waiting for a slot of {limit_name()} (Concurrency in the Prefect UI)"
            with progress(waiting), prefect_client() as client:
                with suppress(ObjectAlreadyExists):
                    one = GlobalConcurrencyLimitCreate(name=limit_name(), limit=1)
                    client.create_global_concurrency_limit(one)
                slot.enter_context(
                    concurrency(
                        limit_name(),
                        lease_duration=LEASE_SECONDS,
                        raise_on_lease_renewal_failure=False,
                    )
                )
        except (RondoError, ConcurrencySlotAcquisitionError) as error:
            log(f"computing without a slot of {limit_name()}: Prefect does not answer ({error})")
    try:
        with gpus.some_gpus(processes):
            yield
    finally:
        with suppress(HTTPError, PrefectException):  # a slot that is not released runs out
            slot.close()
