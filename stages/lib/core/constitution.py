"""The file of annotate.constitution: principles, one per line, blank lines aside."""

import random
from collections.abc import Sequence
from pathlib import Path

from stages.lib.core.errors import BadInput

KEY = "annotate.constitution"


def read_principles(path: Path) -> list[str]:
    """The principles of a file, in order.

    Raises:
        BadInput: there is no such file, it is not UTF-8, or it has no principle.
    """
    if not path.is_file():  # a device could be read without end
        raise BadInput(f"{KEY}: no file {path}; write one principle per line, or set {KEY} to null")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadInput(f"{KEY}: {path} is not UTF-8 ({error}); save it as UTF-8") from None
    if principles := [line.strip() for line in lines if line.strip()]:
        return principles
    raise BadInput(f"{KEY}: {path} is empty; write one principle per line, or set {KEY} to null")


def draw_principle(principles: Sequence[str], seed: int, row_id: str) -> str | None:
    """The principle of a row, drawn by the seed and the row's id; None without a constitution.

    It does not depend on the other rows, so with more prompts the cached answers still apply.
    """
    return random.Random(f"{seed} {row_id}").choice(principles) if principles else None
