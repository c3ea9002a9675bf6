"""Requests to Prefect's server, with Prefect's client.

The client reads its address and the string that it logs in with from the environment
(flows/core/services.py). `rondo up` imports this module while its servers start, because the
import takes 2 s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkerStatus
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import PrefectException
from prefect.settings import (
    PREFECT_CLIENT_MAX_RETRIES,
    get_current_settings,
    temporary_settings,
)
from prefect.states import AwaitingRetry, Crashed

from flows.core.run_locks import is_free
from flows.core.services import API_URL, prefect_pages, without_credentials
from stages.lib.core.errors import RondoError, Unreachable

CUT_OFF = "CutOff"
NIGHTLY = "0 2 * * *"
TIMEOUT_SECONDS, RETRIES = 5.0, 2  # a server that hangs must not hold up the end of `rondo up`


@contextmanager
def prefect_client() -> Iterator[SyncPrefectClient]:
    """A client that gives up within half a minute.

    Raises:
        RondoError: the server does not answer, or answers with an error, e.g. for a flow run that
            was deleted.
    """
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}),
            get_client(httpx_settings={"timeout": TIMEOUT_SECONDS}, sync_client=True) as client,
        ):
            yield client
    except (HTTPError, PrefectException) as error:
        raise RondoError(f"Prefect's server: {type(error).__name__}: {error}") from error


def check_server() -> None:
    """
    Raises:
        Unreachable: the server that Prefect's settings name does not answer within half a minute,
            is another program or of another version, or refuses the string.
    """
    try:
        with prefect_client() as client:
            client.raise_for_api_version_mismatch()
            client.read_flow_runs(limit=1)
    except (RondoError, RuntimeError) as error:
        raise failed(error.__cause__ or error) from None


def failed(cause: object) -> Unreachable:
    """The error of a run whose server does not answer, or not as Prefect's does."""
    url = get_current_settings().api.url or prefect_pages()
    return Unreachable(
        f"Prefect's server at {without_credentials(url)} does not answer ({cause}): the stages "
        f"that are done are kept; start it, or correct or unset {API_URL} (environment, .env, "
        "prefect.toml or Prefect's profile), and run the same command again"
    )


def flow_runs(pool: str | None = None, **filters: object) -> list[FlowRun]:
    """The flow runs of a work pool, or of all, that match Prefect's filters (FlowRunFilter)."""
    with prefect_client() as client:
        return client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate(filters),
            work_pool_filter=(
                WorkPoolFilter.model_validate({"name": {"any_": [pool]}}) if pool else None
            ),
        )


def set_state(run: UUID, state: State) -> None:
    """Set the state of a flow run; a run that has ended keeps its state."""
    with prefect_client() as client:
        client.set_flow_run_state(run, state)


def create_pool(name: str) -> None:
    """Create a work pool, or reset the existing one."""
    with prefect_client() as client:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"), overwrite=True)


def online_workers(pool: str) -> set[str]:
    """The names of the workers of a pool that are online; none if there is no such pool."""
    with prefect_client() as client:
        try:
            workers = client.read_workers_for_work_pool(pool)
        except HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
            return set()
    return {worker.name for worker in workers if worker.status == WorkerStatus.ONLINE}


def offer_nightly(deployment_name: str) -> None:
    """Add an inactive nightly schedule to next-round; an existing one stays as a person left it."""
    with prefect_client() as client:
        deployment = client.read_deployment_by_name(f"next-round/{deployment_name}")
        if not deployment.schedules:
            nightly = CronSchedule(cron=NIGHTLY, timezone="UTC")
            schedule = DeploymentScheduleCreate(schedule=nightly, active=False)
            client.create_deployment_schedules(deployment.id, [schedule])


def cut_off(pool: str) -> list[UUID]:
    """Mark the runs of a worker that has ended: the next one resumes them.

    Prefect's setting for this, PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR=reschedule, holds for
    `prefect flow-run execute`; a process worker starts `python -m prefect.engine` instead.

    Returns:
        All marked runs, also of earlier ends.
    """
    unfinished = {"any_": [StateType.PENDING, StateType.RUNNING]}
    state = {"operator": "or_", "type": unfinished, "name": {"any_": [CUT_OFF]}}
    runs = flow_runs(pool, state=state)
    message = "resumes when its worker starts again (`rondo up`, `rondo worker`)"
    for run in runs:
        if run.state_name != CUT_OFF:
            set_state(run.id, Crashed(name=CUT_OFF, message=message))
    return [run.id for run in runs]


def resume(pool: str) -> list[UUID]:
    """Schedule the runs again that were interrupted when a worker ended or was killed.

    It is called before the worker starts: a run that Prefect shows as running has no process.

    Returns:
        The runs that resume.
    """
    runs = cut_off(pool)
    for run in runs:
        set_state(run, AwaitingRetry())
    return runs


def mark_crashed(runs: Path) -> None:
    """Set the state of runs of the terminal whose process was killed: running, without a worker,
    with a record in this folder, and with a released lock.

    They have no worker that would report this. Prefect's heartbeats take at least 30 s.

    Args:
        runs: the folder of the records and locks.
    """
    for run in flow_runs(deployment_id={"is_null_": True}, state={"type": {"any_": ["RUNNING"]}}):
        if (runs / f"{run.id}.json").exists() and is_free(runs / f"{run.id}.lock"):
            set_state(run.id, Crashed(message="its process ended without reporting a result"))
