"""Marks runs of the terminal as crashed if their process was killed.

They have no worker that would report this, so Prefect would show them as running for ever. An
automation on Prefect's heartbeats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY, at least 30 s) would need a
minute or more; the locks of flows/core/run_locks.py need at most ten seconds.
"""

from pathlib import Path

from prefect.states import Crashed

from flows.core.run_locks import is_free
from flows.orchestration.prefect_requests import flow_runs, set_state

MESSAGE = "its process ended without reporting a result"


def mark_crashed(runs: Path) -> None:
    """Set the state of crashed runs in Prefect: running, without a worker, with a record in this
    folder, and with a released lock.
    """
    for run in flow_runs(deployment_id={"is_null_": True}, state={"type": {"any_": ["RUNNING"]}}):
        if (runs / f"{run.id}.json").exists() and is_free(runs / f"{run.id}.lock"):
            set_state(run.id, Crashed(message=MESSAGE))
