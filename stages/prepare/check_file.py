"""Check data: their form, what becomes of them, statistics, and every bad row with its line.

Run: `rondo check-data SOURCE`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.params import PARAMS_FILE, load_params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.splits import hold_out
from stages.lib.dedup.duplicates import find_duplicates
from stages.prepare.audit import SHOWN_COLUMNS, contradictions, rendered_prompt
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

SEED, EXIT_UNUSABLE = 0, 2
CONFIG = PrepareParams(prompt_format=PromptFormat.chat)
MIN_PAIRS = 50  # for shortcuts: with fewer, an accuracy is not meaningful
SHOWN_ROWS, SHOWN_CHARACTERS = 3, 300  # as the model sees them


def check_data(named: str, split: str, columns: Mapping[str, str], as_json: bool = False) -> int:
    """Print the report on a source.

    Args:
        named: a file, a folder, or a data set of the hub.
        split: of a folder or a data set.
        columns: its names of columns (`prepare.sources[].columns`).
        as_json: one object: `rows`, `usable`, `about` (the lines by name), `bad` (where and why).

    Returns:
        The exit code: 2 if no row can be used, else 0; bad rows are left out of a run, too.

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
    rendering = project_rendering()
    excluded = {
        index: Defect(f"contradiction: {rows[other]['where']} prefers the other text")
        for index, other in contradictions(rows).items()
    } | refused_by_template(rows, rendering)
    bad += [(rows[index]["where"], defect) for index, defect in excluded.items()]
    usable = len(rows) - len(excluded)
    if as_json:
        about: dict[str, list[str]] = {}
        for name, text in describe(parsed, rows, source):
            about.setdefault(name or [*about][-1], []).append(text)
        defects = [{"where": location, "defect": str(defect)} for location, defect in bad]
        result = {"rows": len(raw_rows), "usable": usable, "about": about, "bad": defects}
        print(json.dumps(result, ensure_ascii=False))
        return 0 if usable else EXIT_UNUSABLE
    print(f"{named}: {len(raw_rows)} rows, {usable} of them can be used")
    shown = shown_rows(raw_rows, source, rendering) if rows else ()
    for name, text in itertools.chain(describe(parsed, rows, source), shown):
        print(f"  {name:<11}{text}")
    if bad:
        print(f"{len(bad)} rows are bad:")
    for reason, count in Counter(str(defect).split(":")[0] for _, defect in bad).most_common():
        print(f"  {count:<11}{reason}")
    for location, defect in bad:
        print(f"{location}: {defect}")
    return 0 if usable else EXIT_UNUSABLE


class Rendering(NamedTuple):
    """How the project turns prompts into text; outside of a project, by the defaults."""

    prompt_format: PromptFormat
    tokenizer: Any  # of assets/model; None: a plain prompt needs none
    note: str = ""


def project_rendering() -> Rendering:
    prepare = load_params().prepare if PARAMS_FILE.exists() else PrepareParams()
    if prepare.prompt_format is PromptFormat.plain:
        return Rendering(PromptFormat.plain, None)
    if (MODEL / "tokenizer.json").exists():
        return Rendering(PromptFormat.chat, read_tokenizer())
    return Rendering(
        PromptFormat.plain,
        None,
        " (no assets/model yet, so no chat template: `dvc repro assets` makes it)",
    )


def refused_by_template(rows: list[SourceRow], rendering: Rendering) -> dict[int, Defect]:
    """By index, the rows whose prompt the project's chat template refuses."""
    refused: dict[int, Defect] = {}
    if rendering.prompt_format is PromptFormat.chat:
        for index, row in enumerate(rows):
            try:
                rendered_prompt(rendering.tokenizer, row["prompt"], rendering.prompt_format)
            except Defect as defect:
                refused[index] = defect
    return refused


def describe(
    parsed: list[Reading], rows: list[SourceRow], source: SourceParams
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
    if rows:
        yield from describe_rows(rows)
        yield "params", f"prepare.sources: [{params_line(source)}], and assets.data: files"


def params_line(source: SourceParams) -> str:
    """The source as prepare.sources has it.

    Example:
        >>> params_line(SourceParams(path="a.csv", columns={"prompt": "q"}))
        '{path: a.csv, columns: {prompt: q}}'
    """
    columns = ", ".join(f"{name}: {column}" for name, column in source.columns.items())
    split = f", split: {source.split}" if source.split != "train" else ""
    return f"{{path: {source.path}{split}{f', columns: {{{columns}}}' if columns else ''}}}"


def shown_rows(
    raw_rows: list[tuple[str, Any]], source: SourceParams, rendering: Rendering
) -> Iterator[tuple[str, str]]:
    """The first rows: the prompt as the model sees it, and its responses."""
    prompt_format, tokenizer, note = rendering
    config = PrepareParams(prompt_format=prompt_format)
    usable = (one for one in readings(raw_rows, source.columns, config) if one.row)
    yield "rows", f"the first, as with prepare.prompt_format {prompt_format.value}{note}"
    for reading in itertools.islice(usable, SHOWN_ROWS):
        row = reading.row
        try:
            texts = {"prompt": rendered_prompt(tokenizer, row["prompt"], prompt_format)}
        except Defect:
            texts = {"prompt": "refused by the chat template"}
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
