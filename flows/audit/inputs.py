"""Pairs, prompts and responses in files of any form that `rondo check-data` reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from flows.core.config import resolve_anywhere
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.core.types import Prompt
from stages.lib.data.splits import prompt_key
from stages.prepare.files import read_source
from stages.prepare.sources import Reading, readings

MIN_PAIRS = 50  # with fewer, an interval of the accuracy is wider than +-0.14


def params_for(settings: Iterable[str], are_conversations: bool) -> Params:
    """The params of a command that needs no project; conversations are rendered as chat, unless the
    settings say how.

    Raises:
        BadInput: as `resolve_anywhere`.
    """
    settings = list(settings)
    chosen = any(setting.startswith("prepare.prompt_format=") for setting in settings)
    if are_conversations and not chosen:
        settings.append("prepare.prompt_format=chat")
    return resolve_anywhere(settings)


@dataclass(frozen=True)
class Pairs:
    """The pairs of a file that can be used, and how many rows cannot."""

    rows: list[PreferencePair]
    unusable: list[tuple[str, str]]  # (file:line, why)
    are_conversations: bool


def read_pairs(source: SourceParams, slices: str | None) -> Pairs:
    """Read pairs.

    Args:
        source: the file, folder or data set, and its names of columns.
        slices: the column whose values are slices; None: there is one slice.

    Raises:
        BadInput: it has too few pairs, or no such column.
    """
    kept, are_conversations = read(source, slices)
    rows, unusable = list[PreferencePair](), list[tuple[str, str]]()
    for reading in kept:
        if "chosen" not in reading.row:
            unusable.append((reading.where, str(reading.defect or "it is no pair")))
            continue
        row = {key: reading.row[key] for key in ("prompt", *SIDES, "margin") if key in reading.row}
        origin = {"id": reading.where, "source": slice_of(reading, slices) or source.path}
        rows.append(cast(PreferencePair, row | origin))
    if len(rows) < MIN_PAIRS:
        reason = f"; the first other row, {': '.join(unusable[0])}" if unusable else ""
        raise BadInput(
            f"--pairs {source.path}: {len(rows)} pairs, expected at least {MIN_PAIRS}{reason}; "
            f"`rondo check-data {source.path}` says what becomes of each row"
        )
    return Pairs(rows, unusable, are_conversations)


def read(source: SourceParams, slices: str | None = None) -> tuple[list[Reading], bool]:
    """What becomes of each row; and whether any is a conversation, whose prompt is messages."""
    raw = list(read_source(source, None))
    columns = [slices] if slices else []

    def parse(prompt_format: PromptFormat) -> list[Reading]:
        config = PrepareParams(prompt_format=prompt_format, columns=columns)
        return list(readings(raw, source.columns, config))

    chat = parse(PromptFormat.chat)
    if any(reading.is_conversation for reading in chat):
        return chat, True
    return parse(PromptFormat.plain), False


def slice_of(reading: Reading, slices: str | None) -> str:
    """The value of the column of slices; empty without one.

    Raises:
        BadInput: the row does not have it.
    """
    if slices is None:
        return ""
    value = reading.row["columns"][slices]
    if value is None:
        raise BadInput(f"{reading.where}: no column {slices} (--slice); name one of all rows")
    return str(value)


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts, and the slice of each."""

    prompts: list[Prompt]
    slices: list[str]
    are_conversations: bool


def read_prompts(source: SourceParams, slices: str | None, most: int) -> Prompts:
    """The first distinct prompts of rows of any kind, `most` at most.

    Raises:
        BadInput: there are none, or no such column.
    """
    kept, are_conversations = read(source, slices)
    distinct = {
        prompt_key(one.row["prompt"]): (one.row["prompt"], slice_of(one, slices))
        for one in reversed(kept)
        if one.row
    }
    if not distinct:
        first = next((f"{one.where}: {one.defect}" for one in kept), "it has no rows")
        raise BadInput(f"--prompts {source.path}: no prompts; {first}")
    prompts, values = zip(*[*reversed(distinct.values())][:most], strict=True)
    return Prompts([*prompts], [*values], are_conversations)


def read_responses(path: str, prompts: list[Prompt], samples: int) -> list[list[str]]:
    """`samples` passes of one response per prompt, from rows with a prompt and a response.

    Raises:
        BadInput: a prompt has fewer responses.
    """
    kept, _ = read(SourceParams(path=path))
    by_prompt: dict[str, list[str]] = {}
    for reading in kept:
        if "completion" in reading.row:
            key = prompt_key(reading.row["prompt"])
            by_prompt.setdefault(key, []).append(reading.row["completion"])
    for prompt in prompts:
        if len(texts := by_prompt.get(prompt_key(prompt), [])) < samples:
            raise BadInput(
                f"{path}: {len(texts)} responses to the prompt {str(prompt)!r:.100}, expected "
                f"{samples} (--set evaluate.samples_per_prompt)"
            )
    return [
        [by_prompt[prompt_key(prompt)][number] for prompt in prompts] for number in range(samples)
    ]
