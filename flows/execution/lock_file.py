"""dvc.lock while DVC writes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flows.core.locks import LOCK
from stages.lib.core.files import write_text
from stages.lib.core.reading import parse_yaml


@contextmanager
def keep_other_stages(address: str) -> Iterator[None]:
    """Restore dvc.lock if DVC is cut off in the block and leaves other stages than this one changed
    in it.

    DVC empties the file before it writes it: if it is cut off then, the records of all stages are
    lost.
    """
    before = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    try:
        yield
    except BaseException:
        if LOCK.exists():
            after = LOCK.read_text(encoding="utf-8")
            if after != before and _other_stages(after, address) != _other_stages(before, address):
                write_text(LOCK, before) if before else LOCK.unlink()
        raise


def _other_stages(text: str, address: str) -> dict[str, Any] | None:
    """All stages of a dvc.lock but one; None if it is not valid YAML."""
    try:
        stages = parse_yaml(text)["stages"] if text else {}
        return {name: stage for name, stage in stages.items() if name != address}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
