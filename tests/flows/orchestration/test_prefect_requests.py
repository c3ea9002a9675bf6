"""Which runs `rondo up` takes for its own, on a real Prefect server."""

from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Running

from flows.orchestration import prefect_requests
from stages.lib.core.errors import RondoError


def running_deployment(prefect: SyncPrefectClient, name: str, pool: str | None) -> UUID:
    """A running flow run of a deployment."""
    flow = prefect.create_flow_from_name(name)
    deployment = prefect.create_deployment(flow, name, work_pool_name=pool)
    return prefect.create_flow_run_from_deployment(deployment, state=Running()).id


def test_runs_of_other_work_pools_are_left_alone(prefect: SyncPrefectClient) -> None:
    for pool in ("rondo", "rondo-gpu-1"):
        prefect_requests.create_pool(pool)
    own = running_deployment(prefect, "of-rondo", "rondo")
    other = running_deployment(prefect, "of-another-machine", "rondo-gpu-1")
    served = running_deployment(prefect, "of-another-program", None)  # by `flow.serve()`
    assert prefect_requests.cut_off("rondo") == prefect_requests.resume("rondo") == [own]
    states = [prefect.read_flow_run(run).state for run in (own, other, served)]
    assert [state and state.name for state in states] == ["AwaitingRetry", "Running", "Running"]


def test_a_run_that_was_deleted_is_an_error_of_rondo(prefect: SyncPrefectClient) -> None:
    run = running_deployment(prefect, "deleted", None)
    prefect.delete_flow_run(run)
    with pytest.raises(RondoError, match="Prefect's server: ObjectNotFound"):
        prefect_requests.set_state(run, Running())
