"""How many stages compute at once: Prefect's global concurrency limit `rondo-compute`, 1 unless a
person has set it otherwise.

Runs beside each other, each in a workspace of its own, take turns by stages: what one has computed
the next one gets from DVC's cache. A run without a server (`rondo run` alone) knows of no other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import get_current_settings

LIMIT = "rondo-compute"
LEASE_SECONDS = 60  # Prefect's least: how long a run that was killed keeps its slot


@contextmanager
def compute_slot(say: Callable[[str], None]) -> Iterator[None]:
    """Hold a slot, after waiting for one."""
    if not get_current_settings().api.url:
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
                say(
                    f"waits: {limit.active_slots} of {limit.limit} slots of {LIMIT} are taken by other runs (Prefect's page Concurrency)"
                )
    with concurrency(
        LIMIT, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False
    ):
        yield
