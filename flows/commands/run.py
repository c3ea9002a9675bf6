"""`rondo run` and `rondo next-round`: their flows in this process.

Prefect and what imports it are imported in the functions, after the signal handlers and Prefect's
environment variables are set.
"""

import atexit
import logging
import os
import shlex
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from flows.core import interrupts, services
from flows.core.config import KEEP, one_more_round
from flows.core.databases import check_database
from flows.core.run_locks import is_alive
from flows.core.services import HOME
from flows.execution import dvc_stages, fork_server
from flows.execution.history import resolve_run
from flows.execution.worktree import check_committed, folder_of_run
from stages.lib.core.errors import BadInput, GateFailed, RondoError
from stages.lib.core.progress import progress, reporting

END_SECONDS = 8.0  # from a signal to the end of a run, at most


def run_rounds(
    preset: str, rounds: int | None, settings: list[str], isolated: bool, rerun: list[str]
) -> int:
    """`rondo run`; returns the exit code.

    Args:
        rounds: how many rounds; None: those of params.yaml or the preset.
        rerun: ended rounds to run again.

    Raises:
        RondoError: see `run_flow`; BadInput is raised before anything starts.
    """
    resolve_run(preset, rounds, settings, rerun)
    if isolated:
        check_committed()
    arguments = (preset, rounds or 0, settings, isolated, rerun)
    return run_flow("rlhf_pipeline", *arguments, isolated=isolated)


def continue_run(run: str) -> int:
    """`rondo run --continue`: an isolated run goes on; returns the exit code.

    Raises:
        RondoError: see `run_flow`; BadInput is raised before anything starts.
    """
    home = HOME.resolve()
    folder_of_run(run, home)
    if is_alive(home, run):
        raise BadInput(f"run {run} has not ended: wait for its end, or stop it")
    return run_flow("continued_run", run)


def run_next_round(settings: list[str], isolated: bool) -> int:
    """`rondo next-round`; returns the exit code.

    Raises:
        RondoError: see `run_flow`; BadInput is raised before anything starts.
    """
    resolve_run(KEEP, one_more_round(), settings)
    if isolated:
        check_committed()
    return run_flow("next_round", settings, isolated, isolated=isolated)


def run_flow(name: str, *arguments: Any, isolated: bool = False) -> int:
    """Run a flow in this process, and return the exit code.

    It uses the Prefect server of `rondo up` if that is running, else a temporary one.

    Args:
        name: of the flow in flows/pipeline.py.
        arguments: of the flow.
        isolated: whether the flow creates an isolated run, which another command continues.

    Raises:
        GateFailed: a gate failed.
        Unreachable: Prefect's server went away.
        RondoError: any other error of Rondo.
    """
    kept = "the run ends; stages that are done and saved resume states are kept"
    next_step = "" if isolated else f"; `{shlex.join(['rondo', *sys.argv[1:]])}` continues"
    interrupts.raise_at_signals(kept + next_step, END_SECONDS)
    configure_prefect()
    configure_console()

    # The fork server imports its libraries while Prefect starts.
    with fork_server.fork_server(dvc_stages.stage_environment()), reporting("rondo"):
        with progress("starting Prefect"):
            start_temporary_server(HOME.resolve())
        from httpx import HTTPError, TransportError

        from flows import pipeline
        from flows.orchestration import outcomes, prefect_requests

        try:
            state = getattr(pipeline, name)(*arguments, return_state=True)
        except (TransportError, RuntimeError) as failure:
            # Prefect's client wraps the error of its first request
            cause = failure if isinstance(failure, TransportError) else failure.__cause__
            if not isinstance(cause, HTTPError):
                raise
            raise prefect_requests.failed(cause) from None
    interrupts.exit_at_signals()  # all is recorded
    if state.is_completed() or state.name == outcomes.GATES_FAILED:
        return 0
    if state.name == outcomes.GATE_FAILED:  # the log has its numbers
        raise GateFailed(str(state.message).partition("\n")[0])
    error = state.result(raise_on_failure=False)
    if isinstance(error, RondoError):
        raise error
    if isinstance(error, Exception):
        traceback.print_exception(error)
    print(f"rondo: {state.name}: {state.message}", file=sys.stderr)
    return RondoError.exit_code


def configure_prefect() -> None:
    """Set Prefect's environment variables; call it before Prefect is imported."""
    home = HOME.resolve()
    for name, value in services.prefect_environment(home).items():
        os.environ.setdefault(name, value)
    # Prefect's log goes to its run page; the terminal gets the lines of the logger `rondo`.
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    if services.API_URL in os.environ:  # a server of the user's
        return
    if servers := services.running_prefect(home):
        os.environ[services.API_URL] = f"{servers.prefect}/api"
        os.environ["PREFECT_API_AUTH_STRING"] = servers.auth
    else:  # a temporary one
        check_database(home / services.PREFECT_DATABASE)


def start_temporary_server(home: Path) -> None:
    """Start a Prefect server for this run alone, unless Prefect's settings name one that answers.

    A terminal sends Ctrl-C to its whole process group. The server that Prefect starts by itself is
    in it, and would end before the run has reported its end; this one leads a session of its own.

    Raises:
        Unreachable: the one that they name does not answer.
        RondoError: the server did not start.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    from flows.orchestration import prefect_requests
    from flows.orchestration.service_processes import Services

    if get_current_settings().api.url:
        prefect_requests.check_server()
        return
    with socket.create_server((services.HOST, 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://{services.HOST}:{port}/api"
    os.environ.update(services.server_environment(services.new_auth(), "http://127.0.0.1"))
    os.environ.update({services.API_URL: address, services.TEMPORARY: "true"})
    refresh_global_settings_context()
    server = Services(home / "logs")
    atexit.register(server.stop)  # after the exit handlers of Prefect, which use it
    server.start("temporary-prefect", "flows.orchestration.prefect_server", str(port))
    server.wait_until("temporary-prefect", lambda: services.is_up(f"{address}/health"))


def configure_console() -> None:
    """Print the lines of the logger `rondo` without prefix."""
    console = logging.getLogger("rondo")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    console.addHandler(handler)
    console.setLevel(logging.INFO)
    console.propagate = False
