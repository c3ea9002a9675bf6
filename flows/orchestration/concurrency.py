"""The number of stages that compute at the same time: Prefect's global concurrency limit
`rondo-compute`, 1 unless a person changed it.

Concurrent runs, each in its own workspace, take turns stage by stage; a stage that one run computed
is in DVC's cache for the others. A run without a Prefect server (`rondo run` alone) does not wait.
With several GPUs, each slot has one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import get_current_settings

from flows.execution import gpus

LIMIT = "rondo-compute"
LEASE_SECONDS = 60  # Prefect's minimum; a killed run keeps its slot for this long


@contextmanager
def compute_slot(log: Callable[[str], None]) -> Iterator[None]:
    """Wait for a slot, then hold it."""
    if not get_current_settings().api.url:
        with gpus.one_gpu():
            yield
        return
    with get_client(sync_client=True) as client:
        try:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=LIMIT, limit=1)
            )
        except ObjectAlreadyExists:
            limit = client.read_global_concurrency_limit_by_name(LIMIT)
            if limit.active_slots >= limit.limit:
                log(
                    f"waiting: other runs use {limit.active_slots} of {limit.limit} slots of "
                    f"{LIMIT} (see Concurrency in the Prefect UI)"
                )
    slot = concurrency(
        LIMIT, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False
    )
    with slot, gpus.one_gpu():
        yield
