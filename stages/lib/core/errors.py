"""Typed errors. Each message names the file, line or key, what was expected, and the next step."""

from pydantic import ValidationError


class RondoError(Exception):
    """A stage cannot continue. `exit_code` is the exit code of its process."""

    exit_code = 1


class BadInput(RondoError):
    """The user's params, data or model are invalid."""

    exit_code = 2


class Diverged(RondoError):
    """A loss, gradient or score is not finite. The optimiser step was not applied."""


class RewardsFailed(RondoError):
    """A reward of `ppo.rewards` failed for too many responses, or another model is now behind its
    address. No update was made from its results.
    """


class GateFailed(RondoError):
    """A quality gate failed. The message contains the numbers and the next step."""

    exit_code = 3


class Unreachable(RondoError):
    """The network or a remote server did not answer. A retry may succeed."""

    exit_code = 4


SHOWN_ERRORS = 5  # of a validation: a file can have thousands


def format_validation_errors(error: ValidationError) -> str:
    """The first errors of a pydantic validation in one line, each as `key: reason`."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [
        f"{'.'.join(map(str, detail['loc'])) or 'JSON':.200}: {detail['msg']:.300}"
        for detail in details[:SHOWN_ERRORS]
    ]
    return "; ".join([*shown, *and_more(len(details))])


def and_more(errors: int) -> list[str]:
    """[`and 3 more errors`] if more than SHOWN_ERRORS are to be shown, else []."""
    return [f"and {errors - SHOWN_ERRORS} more errors"] if errors > SHOWN_ERRORS else []
