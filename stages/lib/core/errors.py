"""Typed errors. Each message names the file, line or key, what was expected, and the next step."""

from pydantic import ValidationError


class RondoError(Exception):
    """A stage cannot go on; `exit_code` is what its process ends with."""

    exit_code = 1


class BadInput(RondoError):
    """The user's params, data or model are not what they have to be."""

    exit_code = 2


class Diverged(RondoError):
    """A loss, gradient or score is no finite number; the step that it would have made was not
    applied.
    """


class GateFailed(RondoError):
    """A quality gate said no: the numbers and the next step are in the message."""

    exit_code = 3


class Unreachable(RondoError):
    """What only the network, or a server elsewhere, was missing: the same again may pass."""

    exit_code = 4


def format_validation_errors(error: ValidationError) -> str:
    """What is wrong, `key: reason`, in one line."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'JSON'}: {each['msg']}" for each in error.errors()
    )
