"""Requests to Prefect's server, with Prefect's client.

The client reads its address and the string that it logs in with from the environment
(flows/core/services.py). `rondo up` imports this module while its servers start, because the
import takes 2 s.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkerStatus
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Crashed

from stages.lib.core.errors import RondoError

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


def flow_runs(pool: str | None = None, **filters: object) -> list[FlowRun]:
    """The flow runs of a work pool, or of all, that match Prefect's filters (FlowRunFilter)."""
    with prefect_client() as client:
        return client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate(filters),
            work_pool_filter=(
                WorkPoolFilter.model_validate({"name": {"any_": [pool]}}) if pool else None
            ),
        )


def set_state(run: UUID, state: State, force: bool = False) -> None:
    """Set the state of a flow run; without `force`, a run that has ended keeps its state."""
    with prefect_client() as client:
        client.set_flow_run_state(run, state, force)


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


def running(pool: str) -> list[UUID]:
    """The runs of a worker that have not ended, as far as Prefect knows."""
    state = {"type": {"any_": [StateType.PENDING, StateType.RUNNING]}}
    return [run.id for run in flow_runs(pool, state=state)]


def cut_off(runs: Iterable[UUID], force: bool = False) -> None:
    """Give runs the state of those that `rondo up` interrupts: the next one resumes them.

    Prefect's setting for this, PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR=reschedule, holds for
    `prefect flow-run execute`; a process worker starts `python -m prefect.engine` instead.
    """
    message = "resumes when its worker starts again (`rondo up`, `rondo worker`)"
    for run in runs:
        set_state(run, Crashed(name=CUT_OFF, message=message), force)


def cut_off_crashed(runs: Iterable[UUID]) -> None:
    """The same for those of these runs that reported the signal themselves."""
    crashed = flow_runs(id={"any_": list(runs)}, state={"name": {"any_": ["Crashed"]}})
    cut_off((run.id for run in crashed), force=True)


def reschedule(recorded: Iterable[UUID], pool: str) -> list[UUID]:
    """Schedule the runs again that were interrupted when `rondo up` ended or was killed.

    It is called before the worker starts: a run that Prefect shows as running has no process.

    Args:
        recorded: the runs that `rondo up` interrupted when it ended.
        pool: of the worker.

    Returns:
        The runs that resume.
    """
    dead = running(pool)
    cut_off(dead)
    # Only the crashed ones: others reached their end before `rondo up` did
    crashed = {"type": {"any_": [StateType.CRASHED]}}
    interrupted = [run.id for run in flow_runs(id={"any_": [*recorded, *dead]}, state=crashed)]
    for run in interrupted:
        set_state(run, AwaitingRetry())
    return interrupted
