"""Which runs `rondo up` takes for its own, on a real Prefect server; and servers that are none."""

import socket
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from flows.orchestration import prefect_requests
from stages.lib.core.errors import RondoError, Unreachable


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


def test_a_server_that_is_silent_or_another_program_is_unreachable(
    prefect: SyncPrefectClient, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect_requests.check_server()
    monkeypatch.setattr(prefect_requests, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(prefect_requests, "RETRIES", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answers = {f"http://127.0.0.1:{silent.getsockname()[1]}/api": "timed out"}
        # pages of Prefect's server, as those of another program
        answers |= {api.removesuffix("/api"): "", f"{api}/none": "404"}
        for address, reason in answers.items():
            with (
                temporary_settings({PREFECT_API_URL: address}),
                pytest.raises(Unreachable, match=f"{address} does not answer .*{reason}"),
            ):
                prefect_requests.check_server()
