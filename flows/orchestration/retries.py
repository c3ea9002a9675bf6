"""Retries of a stage that failed because a server was unreachable (Unreachable in
stages/lib/core/errors.py); other failures would only happen again.
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
        BadInput: the environment variable is not a list of seconds.
    """
    value = os.environ.get(VARIABLE, WAITS)
    try:
        return SECONDS.validate_python([part for part in value.split(",") if part.strip()])
    except ValidationError as error:
        raise BadInput(
            f"{VARIABLE}={value}: expected seconds, comma-separated, e.g. {WAITS} "
            f"({format_validation_errors(error)})"
        ) from None


def is_retryable(_task: Task[..., Any], _run: TaskRun, failed: State[Any]) -> bool:
    """Prefect's `retry_condition_fn`; the data of a failed state are the exception."""
    return isinstance(failed.data, Unreachable)
