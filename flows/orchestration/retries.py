"""A stage that only the network failed (stages.errors.Unreachable) is tried again after a wait;
what failed otherwise would fail again.
"""

import os
from typing import Annotated, Any

from prefect import Task
from prefect.client.schemas import State, TaskRun
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from stages.lib.core.errors import BadInput, Unreachable, format_validation_errors

VARIABLE = "RONDO_NETWORK_WAITS"
WAITS = "10,60,300"
SECONDS = TypeAdapter(list[Annotated[FiniteFloat, Field(ge=0)]])


def retry_delays() -> list[float]:
    """Seconds before the second try, before the third, and so on.

    Raises:
        BadInput: the environment variable says something else.
    """
    said = os.environ.get(VARIABLE, WAITS)
    try:
        return SECONDS.validate_python([each for each in said.split(",") if each.strip()])
    except ValidationError as error:
        raise BadInput(
            f"{VARIABLE}={said}: expected seconds, comma-separated, e.g. {WAITS} ({format_validation_errors(error)})"
        ) from None


def is_retryable(_task: Task[..., Any], _run: TaskRun, failed: State[Any]) -> bool:
    """Prefect's `retry_condition_fn`: the state of a try that failed holds what it raised."""
    return isinstance(failed.data, Unreachable)
