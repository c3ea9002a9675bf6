"""How stages and runs end in Prefect and MLflow: green if all gates passed or were approved."""

import html
import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from prefect.client.schemas import State
from prefect.exceptions import FailedRun
from prefect.states import Completed, Failed

from flows.core.addresses import split_address
from flows.core.bookkeeping import bookkeeping
from flows.core.locks import Locks
from flows.core.services import LogLine
from flows.core.verdicts import read_gate
from flows.report import diagnosis, round_files
from flows.tracking.records import NOTE
from stages.gate.verdict import failed_checks, passed_or_approved
from stages.lib.core.errors import GateFailed, RondoError

GATE_FAILED = "GateFailed"  # a gate ended the run
GATES_FAILED = "GatesFailed"  # gates failed, but all stages ran, as their policy allows
WARNED = "Warned"  # a gate that failed, after which the run continues
SHOWN = ("win_rate", "win_rate_low", "win_rate_high")  # of evaluate, in MLflow's list of runs
Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


class WithoutTraceback(logging.Filter):
    """Drops what Prefect's engine logs of a failed state that a flow returned: the traceback of its
    own code, after the line that has the state with its message.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, RondoError | FailedRun)


WITHOUT_TRACEBACK = WithoutTraceback()


def errors_as_states(
    function: Callable[Parameters, Value],
) -> Callable[Parameters, Value | State[Any]]:
    """A flow or task that ends in a failed state where `function` raises an error of Rondo.

    Prefect would log such an error under a traceback of its own code.
    """

    @wraps(function)
    def ends_in_a_state(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value | State[Any]:
        logging.getLogger("prefect.flow_runs").addFilter(WITHOUT_TRACEBACK)
        try:
            return function(*args, **kwargs)
        except RondoError as error:
            return failed(error)

    return ends_in_a_state


def failed(error: RondoError, sentence: str = "") -> State[Any]:
    """The state of a flow or task that ended with this error, which is the state's result."""
    if isinstance(error, GateFailed):
        message = f"{sentence}\n{error}" if sentence else str(error)
        return Failed(name=GATE_FAILED, message=message, data=error)
    return Failed(message=f"{type(error).__name__}: {error}", data=error)


def warned(address: str) -> State[Any] | None:
    """The state of a gate that failed and lets the run continue; None of any other stage."""
    stage, round_ = split_address(address)
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    if verdict is None or passed_or_approved(verdict):
        return None
    return Failed(name=WARNED, message="\n".join(failed_checks(verdict)))


class Conclusion(NamedTuple):
    """What a run ended with. sentence: the stage at fault, and what to do."""

    sentence: str
    gates_failed: bool


def conclusion(rounds: Sequence[str], locks: Locks, log: LogLine) -> Conclusion:
    """That of the rounds of a run; without a sentence if the results cannot be read."""
    with bookkeeping("finding the stage at fault", log):
        return Conclusion(diagnosis.headline(rounds, locks), diagnosis.gates_failed(rounds, locks))
    return Conclusion("", False)


def final_state(ended: Conclusion, error: GateFailed | None) -> State[Any]:
    """The state of a run whose stages have run, or which a gate ended by `error`."""
    if error:
        return failed(error, ended.sentence)
    if ended.gates_failed:
        return Failed(name=GATES_FAILED, message=ended.sentence)
    return Completed(message=ended.sentence)


def tags(
    ended: Conclusion, rounds: Sequence[str], locks: Locks, pages: Sequence[tuple[str, str | None]]
) -> dict[str, str]:
    """Tags of a run in MLflow: its description, and the outcome of each gate.

    Args:
        pages: title and address of what the description links.
    """
    links = [f"[{title}]({url})" for title, url in pages if url]
    description = "\n\n".join([html.escape(ended.sentence, quote=False), " | ".join(links)])
    outcomes = {
        f"{round_}.gate_{gate}": diagnosis.outcome(verdict)
        for round_ in rounds
        for gate, verdict in round_files.verdicts(round_, locks).items()
    }
    return {NOTE: description, **outcomes}


def numbers(rounds: Sequence[str], locks: Locks) -> dict[str, float]:
    """What MLflow's list of runs compares: win rate against SFT, and KL, by round."""
    values: dict[str, float] = {}
    for round_ in rounds:
        metrics = round_files.read_metrics(round_, "evaluate", locks)
        results = {name: metrics.get(name) for name in SHOWN}
        results["kl"] = metrics.get("ppo", {}).get("kl")
        values |= {
            f"{round_}/{name}": value for name, value in results.items() if value is not None
        }
    return values
