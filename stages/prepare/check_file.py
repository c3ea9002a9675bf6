"""What a file of demonstrations or pairs is, and what is wrong with it, line by line: `rondo
check-data FILE`.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Row
from stages.lib.data.splits import hold_out
from stages.lib.dedup.duplicates import find_duplicates
from stages.prepare.audit import contradictions
from stages.prepare.formats import Defect, form, normalise
from stages.prepare.shortcuts import languages, lengths, shortcuts
from stages.prepare.sources import SUFFIXES, asked_and_said, prompt_groups, read_source

SEED, BAD_ROWS = 0, 2
SIMILARITY, HELD_OUT = PrepareParams().near_duplicate, PrepareParams().eval_share
LEAST_PAIRS = 50  # for shortcuts: of fewer, an accuracy says nothing


def check(file: str) -> int:
    """Print what there is to say of a file; 0 if every row can be used, else 2.

    Raises:
        BadInput: no such file, or it has no rows.
    """
    if Path(file).suffix not in SUFFIXES or not Path(file).is_file():
        raise BadInput(f"{file}: expected a file, {' or '.join(SUFFIXES)}")
    read = list(read_source(SourceParams(path=file), None))
    if not read:
        raise BadInput(f"{file}: no rows; expected one JSON object a line (docs/data.schema.json)")
    rows, bad = normalised(read)
    bad += [
        (rows[index]["where"], f"contradiction: {rows[other]['where']} says the opposite")
        for index, other in contradictions(rows).items()
    ]
    print(f"{file}: {len(read)} rows, {len(read) - len(bad)} of them can be used")
    for name, said in [*whole_file([raw for _, raw in read]), *(of_rows(rows) if rows else [])]:
        print(f"  {name:<11}{said}")
    if not bad:
        return 0
    print(f"{len(bad)} rows are bad:")
    for reason, count in Counter(reason.split(":")[0] for _, reason in bad).most_common():
        print(f"  {count:<11}{reason}")
    for where, reason in bad:
        print(f"{where}: {reason}")
    return BAD_ROWS


def normalised(read: list[tuple[str, Any]]) -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows that are sound, and of the others place and reason."""
    rows, bad = [], []
    for where, raw in read:
        try:
            if isinstance(raw, Defect):
                raise raw
            rows.append({**normalise(raw, PromptFormat.chat), "where": where})
        except Defect as defect:
            bad.append((where, str(defect)))
    return rows, bad


def whole_file(raws: list[Any]) -> Iterator[tuple[str, str]]:
    forms = Counter(form(raw) for raw in raws)
    yield "form", "; ".join(f"{name} ({count})" for name, count in forms.most_common())


def of_rows(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """What the sound rows are like."""
    pairs = [row for row in rows if "chosen" in row]
    yield "kind", f"{len(pairs)} pairs, {len(rows) - len(pairs)} demonstrations"
    if pairs:
        yield "margin", f"in {sum('margin' in row for row in pairs)} of {len(pairs)} pairs"
    several = sum(sum(message["role"] == "user" for message in row["prompt"]) > 1 for row in rows)
    yield "turns", f"{several / len(rows):.1%} of the prompts have more than one turn of the user"
    for field, units in lengths(rows).items():
        said = (
            f"{unit} {of['p5']:g} / {of['p50']:g} / {of['p95']:g} / {of['max']:g}"
            for unit, of in units.items()
        )
        yield field, ", ".join(said) + " (5% / median / 95% / longest)"
    yield (
        "languages",
        ", ".join(f"{name} {share:.1%}" for name, share in languages(rows, SEED)["shares"].items()),
    )
    exact, near = find_duplicates(asked_and_said(rows), SIMILARITY)
    yield "duplicates", f"{len(exact)} exact, {len(near)} near (prepare leaves them out)"
    yield from predictable(pairs)


def predictable(pairs: list[Row]) -> Iterator[tuple[str, str]]:
    """What picks the chosen text without understanding it."""
    groups = prompt_groups(pairs, SIMILARITY)
    held_out = hold_out(groups, HELD_OUT, SEED) if pairs else set()
    parts = [
        [row for row, of in zip(pairs, groups, strict=True) if (of in held_out) == out]
        for out in (False, True)
    ]
    if min(map(len, parts)) < LEAST_PAIRS * HELD_OUT:
        yield "shortcuts", f"not measured: too few pairs ({len(pairs)})"
        return
    found = shortcuts(parts[0], parts[1], SEED)
    yield (
        "shortcuts",
        f"of all pairs; TF-IDF learns from {found['train_pairs']} and is tried on {found['held_out_pairs']}",
    )
    for rule in found["rules"]:
        yield "", rule["meaning"]
    for side, words in found["words"].items():
        yield "", f"words of {side} texts: {', '.join(words)}"
