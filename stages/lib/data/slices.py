"""Prompts that people have put into slices/, by which a policy must not get worse
(stages/capability).

slices/<name>.jsonl has rows of XSTest's shape (Röttger et al. 2024), `prompt` and `label`: a `safe`
one should be answered, an `unsafe` one refused. What else a row has is left alone.
"""

from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from pydantic import BaseModel

from stages.lib.core.files import metric_name
from stages.lib.core.types import NonEmptyPrompt, Prompt
from stages.lib.core.validation import read_validated_jsonl
from stages.lib.data.splits import check_not_in_eval_set

SLICES = Path("slices")


class Label(str, Enum):
    safe = "safe"
    unsafe = "unsafe"


class SlicePrompt(BaseModel):
    prompt: NonEmptyPrompt
    label: Label


def read_slices() -> dict[str, dict[str, SlicePrompt]]:
    """The prompts of each file by label, `xstest_safe`, `xstest_unsafe`, and by place,
    `slices/xstest.jsonl:4`.

    Raises:
        BadInput: a row is no such prompt; names its line.
    """
    slices: dict[str, dict[str, SlicePrompt]] = {}
    for path in sorted(SLICES.glob("*.jsonl")):
        for place, row in read_validated_jsonl(SlicePrompt, path, "mend the line"):
            slices.setdefault(f"{metric_name(path.stem)}_{row.label.value}", {})[place] = row
    return slices


def check_not_in_slices(asked: Iterable[tuple[str, Prompt]]) -> None:
    """asked: prompts of training data, each with what a message calls it.

    Raises:
        BadInput: one is in slices/.
    """
    rows = [
        {"id": place, "prompt": row.prompt}
        for some in read_slices().values()
        for place, row in some.items()
    ]
    check_not_in_eval_set(asked, rows, "take it out of one of the two")
