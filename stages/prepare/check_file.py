"""Check a file of demonstrations or pairs: its form, statistics, and every bad row with its line.

Run: `rondo check-data FILE`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.splits import hold_out
from stages.lib.dedup.duplicates import find_duplicates
from stages.prepare.audit import SHOWN_COLUMNS, contradictions
from stages.prepare.formats import (
    Defect,
    Messages,
    SourcePair,
    SourceRow,
    form,
    ignored_columns,
    normalise,
)
from stages.prepare.shortcuts import languages, lengths, shortcuts
from stages.prepare.sources import SUFFIXES, prompt_groups, prompts_and_responses, read_source

SEED, EXIT_BAD_ROWS = 0, 2
SIMILARITY, EVAL_SHARE = PrepareParams().near_duplicate, PrepareParams().eval_share
MIN_PAIRS = 50  # for shortcuts: with fewer, an accuracy is not meaningful


def check_file(file: str) -> int:
    """Print the report on a file.

    Returns:
        The exit code: 0 if every row can be used, else 2.

    Raises:
        BadInput: there is no such file, or it has no rows.
    """
    if Path(file).suffix not in SUFFIXES or not Path(file).is_file():
        raise BadInput(f"{file}: expected a file, {' or '.join(SUFFIXES)}")
    raw_rows = list(read_source(SourceParams(path=file), None))
    if not raw_rows:
        raise BadInput(
            f"{file}: no rows; expected one JSON object per line (docs/data.schema.json)"
        )
    rows, bad = split_bad_rows(raw_rows)
    bad += [
        (rows[index]["where"], f"contradiction: {rows[other]['where']} prefers the other text")
        for index, other in contradictions(rows).items()
    ]
    print(f"{file}: {len(raw_rows)} rows, {len(raw_rows) - len(bad)} of them can be used")
    print(f"  {'form':<11}{count_forms(raw for _, raw in raw_rows)}")
    ignored = Counter(
        name for _, raw in raw_rows if isinstance(raw, dict) for name in ignored_columns(raw, ())
    )
    if ignored:
        print(
            f"  {'ignored':<11}columns "
            + ", ".join(f"{name} ({count})" for name, count in ignored.most_common(SHOWN_COLUMNS))
        )
    for name, text in describe_rows(rows) if rows else ():
        print(f"  {name:<11}{text}")
    if not bad:
        return 0
    print(f"{len(bad)} rows are bad:")
    for reason, count in Counter(reason.split(":")[0] for _, reason in bad).most_common():
        print(f"  {count:<11}{reason}")
    for location, reason in bad:
        print(f"{location}: {reason}")
    return EXIT_BAD_ROWS


def split_bad_rows(
    raw_rows: list[tuple[str, Any]],
) -> tuple[list[SourceRow], list[tuple[str, str]]]:
    """Normalise (location, raw row) pairs: (normalised rows, [(location, reason)] of bad rows)."""
    rows: list[SourceRow] = []
    bad: list[tuple[str, str]] = []
    for location, raw in raw_rows:
        try:
            if isinstance(raw, Defect):
                raise raw
            row = normalise(raw, PromptFormat.chat) | {"where": location}
            rows.append(cast(SourceRow, row))
        except Defect as defect:
            bad.append((location, str(defect)))
    return rows, bad


def count_forms(raws: Iterable[Any]) -> str:
    """The forms of raw rows with their counts."""
    forms = Counter(form(raw) for raw in raws)
    return "; ".join(f"{name} ({count})" for name, count in forms.most_common())


def describe_rows(rows: list[SourceRow]) -> Iterator[tuple[str, str]]:
    """(name, text) of each statistic of the normalised rows."""
    pairs = [row for row in rows if "chosen" in row]
    yield "kind", f"{len(pairs)} pairs, {len(rows) - len(pairs)} demonstrations"
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
    exact, near = find_duplicates(prompts_and_responses(rows), SIMILARITY)
    yield "duplicates", f"{len(exact)} exact, {len(near)} near (prepare drops them)"
    yield from describe_shortcuts(pairs)


def describe_shortcuts(pairs: list[SourcePair]) -> Iterator[tuple[str, str]]:
    """(name, text) of each shortcut, measured on a split like prepare's."""
    groups = prompt_groups(pairs, SIMILARITY)
    held_out_groups = hold_out(groups, EVAL_SHARE, SEED) if pairs else set()
    train, held_out = (
        [
            row
            for row, group in zip(pairs, groups, strict=True)
            if (group in held_out_groups) == is_held_out
        ]
        for is_held_out in (False, True)
    )
    if min(len(train), len(held_out)) < MIN_PAIRS * EVAL_SHARE:
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
