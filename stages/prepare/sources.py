"""The users' own data: files, hub data sets, and what assets fetched from the hub."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.lib.core import hub
from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.source_files import changed_sources
from stages.lib.core.types import Prompt, Row
from stages.lib.data.splits import (
    PromptIndex,
    check_no_prompt_overlap,
    hold_out,
    overlapping,
    prompt_key,
)
from stages.lib.dedup.duplicates import near_groups
from stages.prepare.audit import BAD, SHARED_PROMPT, TIE, Audit
from stages.prepare.formats import Defect, Tie, normalise, source_texts

SUFFIXES = (".jsonl", ".parquet")


def source_sets(params: Params, tokenizer: Any, audit: Audit) -> dict[str, list[Row]]:
    """The six data sets from the sources, held out by prompt: rows of `use: eval`, else a share of
    the prompts.

    Raises:
        Unreachable: a source is the hub's, which is away.
        BadInput: too many bad rows, train/eval overlap, or a set without rows.
    """
    config = params.prepare
    rows = read_rows(listed_sources(params), config, frozenset(tokenizer.all_special_tokens), audit)
    audit.check_bad_share(config.max_bad_share)
    rows = audit.drop_contradictions(rows)
    rows.sort(
        key=lambda row: row["use"] != "eval"
    )  # of duplicates the held-out one stays, so that no copy is trained on
    rows = audit.drop_duplicates(rows, asked_and_said(rows), config.near_duplicate)
    rows = audit.drop_long_prompts(rows, (row["prompt"] for row in rows), tokenizer, config)
    rows = separate(rows, own=params.assets.data == "files", audit=audit)
    audit.rows_kept = len(rows)
    groups = prompt_groups(rows, config.near_duplicate)
    held_out = held_out_groups(rows, groups, config.eval_share, params.seed)

    demonstrated = any("completion" in row for row in rows)
    sets: dict[str, list[Row]] = {}
    for part in ("train", "eval"):
        here = [
            row
            for row, of in zip(rows, groups, strict=True)
            if (row["use"] == "eval" or of in held_out) == (part == "eval")
        ]
        pairs = [row for row in here if "chosen" in row]
        shown = [row for row in here if "completion" in row] if demonstrated else chosen_once(pairs)
        sets[f"pairs_{part}"] = [
            select(row, "prompt", "chosen", "rejected", "margin", "source") for row in pairs
        ]
        sets[f"sft_{part}"] = [select(row, "prompt", "completion", "source") for row in shown]
        sets[f"prompts_{part}"] = [select(row, "prompt", "source") for row in once(here)]
    return frozen_prompts(sets, config.max_eval_prompts, params.seed)


def read_rows(
    sources: list[SourceParams], config: PrepareParams, special_tokens: frozenset[str], audit: Audit
) -> list[Row]:
    """The normalised rows of all sources; defects go to the audit."""
    rows = []
    for source in sources:
        for where, raw in read_source(source, config.max_rows):
            audit.rows_read[source.path] += 1
            try:
                if isinstance(raw, Defect):
                    raise raw
                row = normalise(raw, config.prompt_format, special_tokens)
                rows.append({**row, "where": where, "source": source.path, "use": source.use})
            except Defect as defect:
                audit.lose(
                    TIE if isinstance(defect, Tie) else BAD,
                    where,
                    raw_text(raw),
                    reason=str(defect),
                )
    return rows


def frozen_prompts(sets: dict[str, list[Row]], most: int, seed: int) -> dict[str, list[Row]]:
    """Turn the held-out prompts into the evaluation set: `most` at random, none of which begins a
    training prompt.
    """
    held_out = sets.pop("prompts_eval")
    train = PromptIndex(row["prompt"] for row in sets["prompts_train"])
    clear = [
        {"id": row["id"], "prompt": row["prompt"]}
        for row in held_out
        if not train.has_start(row["prompt"])
    ]
    random.Random(seed).shuffle(clear)
    return {**sets, "eval_prompts": clear[:most]}


def listed_sources(params: Params) -> list[SourceParams]:
    """prepare.sources, or what assets fetched by hub id."""
    if params.assets.data != "files":
        folder = ASSETS / "data"
        files = ((folder / "train.jsonl", "train"), (folder / "eval.jsonl", "eval"))
        return [SourceParams(path=str(path), use=use) for path, use in files if path.exists()]
    for path in changed_sources(params):
        raise BadInput(
            f"{path} changed since the assets stage recorded it; run `dvc repro --force assets`"
        )
    return params.prepare.sources


def declared_files(params: Params) -> frozenset[str]:
    """The user's own files of held-out rows: what leaks from them is for the user to mend."""
    own = params.prepare.sources if params.assets.data == "files" else []
    return frozenset(source.path for source in own if source.use == "eval")


def read_source(source: SourceParams, max_rows: int | None) -> Iterator[tuple[str, Any]]:
    """(file:line, row) of a source; a line that is no JSON comes as a Defect."""
    path = Path(source.path)
    if path.suffix == ".jsonl" and path.is_file():
        rows = read_lines(path)
    elif path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet  # type: ignore[import-untyped]  # comes with datasets

        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    elif path.suffix in SUFFIXES or path.exists() or source.path.count("/") != 1:
        raise BadInput(
            f"prepare.sources: {path}: expected a file ({' or '.join(SUFFIXES)}) or a data set's hub id (name/name)"
        )
    else:
        rows = enumerate(read_hub(source), 1)
    return ((f"{source.path}:{line}", row) for line, row in itertools.islice(rows, max_rows))


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1 with each line's value; blank lines are passed over."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield number, json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                yield number, Defect(f"not JSON: {error}")


def read_hub(source: SourceParams) -> Any:
    import datasets

    with hub.hub_errors(
        f"prepare.sources: {source.path}",
        f"no such file, and the hub does not give split {source.split}",
    ):
        return datasets.load_dataset(source.path, split=source.split)


def separate(rows: list[Row], own: bool, audit: Audit) -> list[Row]:
    """Training rows whose prompt is held out by a source: refused in the user's own files, dropped
    from a hub data set's.
    """
    eval_rows, train_rows = (
        [row for row in rows if row["use"] == use] for use in ("eval", "train")
    )
    if own:
        check_no_prompt_overlap(eval_rows, train_rows)
        return rows
    leaked = {
        train["where"]: held_out["where"] for held_out, train in overlapping(eval_rows, train_rows)
    }
    for where, held_out in leaked.items():
        audit.lose(SHARED_PROMPT, where, of=held_out)
    return [row for row in rows if row["where"] not in leaked]


def group(prompt: Prompt) -> str:
    """What is held out together: equal prompts, and conversations with the same first user turn."""
    if isinstance(prompt, str):
        return prompt_key(prompt.split("\n\nAssistant:")[0])
    return prompt_key(
        next((message["content"] for message in prompt if message["role"] == "user"), "")
    )


def prompt_groups(rows: list[Row], similarity: float) -> list[str]:
    """The group of each row; those whose keys are near duplicates are one group."""
    keys = [group(row["prompt"]) for row in rows]
    distinct = list(dict.fromkeys(keys))
    first = {
        key: distinct[leader]
        for key, leader in zip(distinct, near_groups(distinct, similarity), strict=True)
    }
    return [first[key] for key in keys]


def held_out_groups(rows: list[Row], groups: list[str], share: float, seed: int) -> set[str]:
    """Groups to hold out for each kind of row (pairs, demonstrations) of which no source is held
    out.
    """
    held_out: set[str] = set()
    for kind in ("chosen", "completion"):
        mine = [(row, of) for row, of in zip(rows, groups, strict=True) if kind in row]
        if mine and all(row["use"] == "train" for row, _ in mine):
            held_out |= hold_out((of for _, of in mine), share, seed)
    return held_out


def asked_and_said(rows: list[Row]) -> list[tuple[str, str]]:
    """Each row's prompt, and its responses."""
    texts = (list(source_texts(row)) for row in rows)
    return [(prompt, "\n".join(responses)) for prompt, *responses in texts]


def chosen_once(pairs: list[Row]) -> list[Row]:
    """The better answers as demonstrations, each once."""
    distinct = {
        (prompt_key(row["prompt"]), row["chosen"]): {**row, "completion": row["chosen"]}
        for row in reversed(pairs)
    }
    return list(distinct.values())[::-1]


def once(rows: list[Row]) -> list[Row]:
    """The first row of each prompt."""
    return list({prompt_key(row["prompt"]): row for row in reversed(rows)}.values())[::-1]


def select(row: Row, *names: str) -> Row:
    return {"id": row["where"], **{name: row[name] for name in names if name in row}}


def raw_text(raw: Any) -> str:
    return str(raw) if isinstance(raw, Defect) else json.dumps(raw, ensure_ascii=False, default=str)
