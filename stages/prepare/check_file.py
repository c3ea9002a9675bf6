"""Check data: their form, what becomes of them, statistics, and every bad row with its line.

Run: `rondo check-data SOURCE`.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.params import load_params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.prompts import PromptRefused, render_prompt
from stages.lib.data.splits import hold_out
from stages.lib.dedup.duplicates import find_duplicates
from stages.prepare.audit import SHOWN_COLUMNS, contradictions
from stages.prepare.files import read_source
from stages.prepare.normalise import SourcePair, SourceRow
from stages.prepare.shortcuts import languages, lengths, shortcuts
from stages.prepare.sources import (
    KINDS,
    MODEL,
    Reading,
    kind_of,
    prompt_groups,
    prompts_and_responses,
    read_tokenizer,
    readings,
)
from stages.prepare.turns import Defect, Messages

SEED, EXIT_BAD_ROWS = 0, 2
CONFIG = PrepareParams(prompt_format=PromptFormat.chat)
MIN_PAIRS = 50  # for shortcuts: with fewer, an accuracy is not meaningful
SHOWN_ROWS, SHOWN_CHARACTERS = 3, 300  # as the model sees them


def check_data(named: str, split: str, columns: Mapping[str, str]) -> int:
    """Print the report on a source.

    Args:
        named: a file, a folder, or a data set of the hub.
        split: of a folder or a data set.
        columns: its names of columns (`prepare.sources[].columns`).

    Returns:
        The exit code: 0 if every row can be used, else 2.

    Raises:
        BadInput: there is no such source, or it has no rows.
        Unreachable: it is on the hub, which cannot be reached.
    """
    source = SourceParams(path=named, split=split, columns=dict(columns))
    raw_rows = list(read_source(source, None))
    if not raw_rows:
        raise BadInput(f"{named}: no rows; expected some (docs/data.md, *Formats*)")
    parsed = list(readings(raw_rows, columns, CONFIG))
    rows = [
        cast(SourceRow, reading.row | {"where": reading.where}) for reading in parsed if reading.row
    ]
    bad = [(reading.where, reading.defect) for reading in parsed if reading.defect]
    bad += [
        (
            rows[index]["where"],
            Defect(f"contradiction: {rows[other]['where']} prefers the other text"),
        )
        for index, other in contradictions(rows).items()
    ]
    usable = len(rows) - len(contradictions(rows))
    print(f"{named}: {len(raw_rows)} rows, {usable} of them can be used")
    for name, text in describe(parsed, rows, source, raw_rows):
        print(f"  {name:<11}{text}")
    if not bad:
        return 0
    print(f"{len(bad)} rows are bad:")
    for reason, count in Counter(str(defect).split(":")[0] for _, defect in bad).most_common():
        print(f"  {count:<11}{reason}")
    for location, defect in bad:
        print(f"{location}: {defect}")
    return EXIT_BAD_ROWS


def describe(
    parsed: list[Reading],
    rows: list[SourceRow],
    source: SourceParams,
    raw_rows: list[tuple[str, Any]],
) -> Iterator[tuple[str, str]]:
    """(name, text) of each line on the source as a whole."""
    forms = Counter(reading.form for reading in parsed)
    for number, (form, count) in enumerate(forms.most_common()):
        name = f"{form.name} ({count}): becomes {form.becomes}" if form else f"unknown ({count})"
        note = f"; {form.note}" if form and form.note else ""
        yield "" if number else "form", name + note
    if ignored := Counter(name for reading in parsed for name in reading.ignored):
        names = (f"{name} ({count})" for name, count in ignored.most_common(SHOWN_COLUMNS))
        yield "ignored", f"columns {', '.join(names)}"
    if not rows:
        return
    yield from describe_rows(rows)
    yield "params", f"prepare.sources: [{params_line(source)}]"
    yield from shown_rows(source, raw_rows)


def params_line(source: SourceParams) -> str:
    """The source as prepare.sources has it.

    Example:
        >>> params_line(SourceParams(path="a.csv", columns={"prompt": "q"}))
        '{path: a.csv, columns: {prompt: q}}'
    """
    columns = ", ".join(f"{name}: {column}" for name, column in source.columns.items())
    split = f", split: {source.split}" if source.split != "train" else ""
    return f"{{path: {source.path}{split}{f', columns: {{{columns}}}' if columns else ''}}}"


def shown_rows(source: SourceParams, raw_rows: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """The first rows: the prompt as the model sees it, and its responses."""
    has_project, has_model = Path("params.yaml").exists(), (MODEL / "tokenizer.json").exists()
    prompt_format = load_params().prepare.prompt_format if has_project else PromptFormat.plain
    tokenizer = read_tokenizer() if has_model else None
    note = ""
    if prompt_format is PromptFormat.chat and not has_model:
        prompt_format, note = PromptFormat.plain, " (no assets/model yet, so no chat template)"
    config = PrepareParams(prompt_format=prompt_format)
    usable = (one for one in readings(raw_rows, source.columns, config) if one.row)
    yield "rows", f"the first, as with prepare.prompt_format {prompt_format.value}{note}"
    for reading in itertools.islice(usable, SHOWN_ROWS):
        row = reading.row
        try:
            texts = {"prompt": render_prompt(tokenizer, row["prompt"], prompt_format)}
        except PromptRefused as refused:
            texts = {"prompt": f"refused by the chat template: {refused.__cause__}"}
        texts |= {name: row[name] for name in ("chosen", "rejected", "completion") if name in row}
        yield "", reading.where
        for name, text in texts.items():
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
            yield "", f"  {name:<11}{shown!r}"


def describe_rows(rows: list[SourceRow]) -> Iterator[tuple[str, str]]:
    """(name, text) of each statistic of the normalised rows."""
    pairs = [row for row in rows if "chosen" in row]
    counts = Counter(KINDS[kind_of(row)] for row in rows)
    yield "kind", ", ".join(f"{counts[kind]} {kind}" for kind in KINDS.values() if counts[kind])
    if pairs:
        yield "margin", f"in {sum('margin' in row for row in pairs)} of {len(pairs)} pairs"
    user_turns = [
        sum(turn["role"] == "user" for turn in cast(Messages, row["prompt"])) for row in rows
    ]
    multi_turn = sum(turns > 1 for turns in user_turns)
    yield "turns", f"{multi_turn / len(rows):.1%} of the prompts have more than one user turn"
    for field, units in lengths(rows).items():
        texts = (
            f"{unit} {length['p5']:g} / {length['p50']:g} / {length['p95']:g} / {length['max']:g}"
            for unit, length in units.items()
        )
        yield field, ", ".join(texts) + " (5% / median / 95% / longest)"
    shares = languages(rows, SEED)["shares"]
    yield "languages", ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    exact, near = find_duplicates(prompts_and_responses(rows), CONFIG.near_duplicate)
    yield "duplicates", f"{len(exact)} exact, {len(near)} near (prepare drops them)"
    yield from describe_shortcuts(pairs)


def describe_shortcuts(pairs: list[SourcePair]) -> Iterator[tuple[str, str]]:
    """(name, text) of each shortcut, measured on a split like prepare's."""
    groups = prompt_groups(pairs, CONFIG.near_duplicate)
    held_out_groups = hold_out(groups, CONFIG.eval_share, SEED) if pairs else set()
    train, held_out = (
        [
            row
            for row, group in zip(pairs, groups, strict=True)
            if (group in held_out_groups) == is_held_out
        ]
        for is_held_out in (False, True)
    )
    if min(len(train), len(held_out)) < MIN_PAIRS * CONFIG.eval_share:
        yield "shortcuts", f"not measured: too few pairs ({len(pairs)})"
        return
    report = shortcuts(train, held_out, SEED)
    yield (
        "shortcuts",
        f"in all pairs; TF-IDF is trained on {report['train_pairs']} and measured on"
        f" {report['held_out_pairs']}",
    )
    for rule in report["rules"]:
        yield "", rule["meaning"]
    for side, words in report["words"].items():
        yield "", f"words of {side} texts: {', '.join(words)}"
