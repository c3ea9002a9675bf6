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
    prefect_requests.create_pool()
    own = running_deployment(prefect, "of-rondo", prefect_requests.POOL)
    served = running_deployment(prefect, "of-another-program", None)  # by `flow.serve()`
    assert own in prefect_requests.running() and served not in prefect_requests.running()
    assert own in prefect_requests.reschedule([])
    states = [prefect.read_flow_run(run).state for run in (own, served)]
    assert [state and state.name for state in states] == ["AwaitingRetry", "Running"]


def test_a_run_that_was_deleted_is_an_error_of_rondo(prefect: SyncPrefectClient) -> None:
    run = running_deployment(prefect, "deleted", None)
    prefect.delete_flow_run(run)
    with pytest.raises(RondoError, match="Prefect's server: ObjectNotFound"):
        prefect_requests.set_state(run, Running())
