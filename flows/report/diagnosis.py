"""Which stage is at fault, and what to do: the sentence on top of the report and at the end of a
run.
"""

from collections.abc import Sequence

from flows.core.locks import Locks
from flows.report import summary


def headline(rounds: Sequence[str], locks: Locks) -> str:
    """One sentence about these rounds: the stage at fault first, and what to do.

    It is about the first round that has not reached all gates, else about the last one.
    """
    lines = summary.verdict_lines(list(rounds), locks)
    return lines[-1] if lines else "no round has results yet"


def gates_failed(rounds: Sequence[str], locks: Locks) -> bool:
    """Whether a gate of these rounds failed and no person approved it, also with policy `warn`."""
    return any(
        not summary.passed_or_approved(verdict)
        for name in rounds
        for verdict in summary.verdicts(name, locks).values()
    )
