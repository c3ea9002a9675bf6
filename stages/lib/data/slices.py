"""Prompts that people put into slices/, on which a policy must not get worse (stages/capability).

slices/<name>.jsonl has rows in the format of XSTest (Röttger et al. 2024) with `prompt` and
`label`: a `safe` prompt should be answered, an `unsafe` one refused. Other keys are ignored.
"""

from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from pydantic import BaseModel

from stages.lib.core.files import metric_name
from stages.lib.core.rows import PromptRow
from stages.lib.core.types import NonEmptyPrompt, Prompt
from stages.lib.core.validation import read_validated_jsonl
from stages.lib.data.splits import check_not_in_eval_set

SLICES = Path("slices")


class Label(str, Enum):
    safe = "safe"
    unsafe = "unsafe"


class SlicePrompt(BaseModel):
    """A row of slices/<name>.jsonl."""

    prompt: NonEmptyPrompt
    label: Label


def read_slices() -> dict[str, dict[str, SlicePrompt]]:
    """Read all prompts of slices/.

    Returns:
        By slice (file name and label, e.g. `xstest_unsafe`) and by location (e.g.
        `slices/xstest.jsonl:4`).

    Raises:
        BadInput: a row is not a valid slice prompt; the message names its line.
    """
    slices: dict[str, dict[str, SlicePrompt]] = {}
    for path in sorted(SLICES.glob("*.jsonl")):
        for location, row in read_validated_jsonl(SlicePrompt, path, "correct the line"):
            name = f"{metric_name(path.stem)}_{row.label.value}"
            slices.setdefault(name, {})[location] = row
    return slices


def check_not_in_slices(prompts: Iterable[tuple[str, Prompt]]) -> None:
    """Check that no prompt of training data is in slices/."""
    rows: list[PromptRow] = [
        {"id": location, "prompt": row.prompt}
        for by_location in read_slices().values()
        for location, row in by_location.items()
    ]
    check_not_in_eval_set(prompts, rows, "remove it from one of the two")
