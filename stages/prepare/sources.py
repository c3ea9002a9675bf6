"""Read the users' own data: files, hub data sets, and the hub data set fetched by assets."""

import itertools
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from stages.lib.core import hub
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import ASSETS
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.progress import tracked
from stages.lib.core.ram import ram_bytes
from stages.lib.core.reading import parse_json, read_lines
from stages.lib.core.rows import Columns, HasPrompt, PromptRow
from stages.lib.core.types import Prompt
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.splits import (
    DataSets,
    PromptIndex,
    dedupe_prompts,
    hold_out,
    prompt_key,
)
from stages.lib.dedup.duplicates import near_groups
from stages.prepare.audit import ANOTHER_SPEAKER, BAD, SHARED_PROMPT, TIE, Audit
from stages.prepare.formats import (
    AnotherSpeaker,
    Defect,
    SourceDemonstration,
    SourcePair,
    SourceRow,
    Tie,
    ignored_columns,
    is_conversation,
    normalise,
    source_texts,
)


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Within this context, an error of pyarrow about the file is a BadInput."""
    try:
        yield
    except RondoError:
        raise
    # pyarrow raises its own errors, OSError, MemoryError and, of texts, UnicodeDecodeError
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{path}: no Parquet file that can be read ({type(error).__name__}: {reason}); "
            "write it again, or convert it to JSON Lines"
        ) from None


def open_parquet(path: Path) -> Any:
    """pyarrow's ParquetFile.

    Raises:
        BadInput: it is damaged, or two of its columns have one name.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]  # comes with datasets

    with parquet_errors(path):
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"{path}: two columns have the name {twice[0]!r:.60}; rename one of them")
    return file


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, by the names of the columns.

    Raises:
        BadInput: the file is damaged.
    """
    file = open_parquet(path)
    with parquet_errors(path):
        for batch in file.iter_batches():
            yield from batch.to_pylist()


# docs/performance.md: memory at the peak per byte of text in JSON Lines, and what imports, tables
# of hashes and the TF-IDF baseline take for any large number of rows
PEAK_PER_BYTE, FIXED_BYTES = 5.5, 1.2 * 2**30
SAMPLE_BYTES = 1 << 20  # of a file, to estimate the length of its lines


class Size(NamedTuple):
    """bytes: of the text that is read. rows: their number, an estimate for JSON Lines."""

    bytes: float
    rows: float


def check_memory(sources: Sequence[SourceParams], config: PrepareParams) -> None:
    """Check that the machine has the memory for the rows of local files, if all of it were free."""
    sizes = [
        size_to_read(Path(source.path), config.max_rows)
        for source in sources
        if Path(source.path).is_file()
    ]
    text, rows = (sum(column) for column in zip(Size(0, 0), *sizes, strict=True))
    available = ram_bytes()
    needed = FIXED_BYTES + PEAK_PER_BYTE * text
    if needed > available:
        fitting = int(rows * max(available - FIXED_BYTES, 0) / (needed - FIXED_BYTES) / len(sizes))
        raise BadInput(
            f"prepare.sources: about {rows:,.0f} rows with {text / 2**30:.1f} GiB of text need "
            f"about {needed / 2**30:.1f} GiB of memory, and this machine has "
            f"{available / 2**30:.1f} GiB: set prepare.max_rows to at most {fitting:,} rows per "
            "source, or run prepare on a machine with more memory"
        )


def size_to_read(path: Path, max_rows: int | None) -> Size:
    """The size of the rows of a file that prepare reads: at most `max_rows`."""
    if path.suffix == ".parquet":
        metadata = open_parquet(path).metadata
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        size = Size(sum(group.total_byte_size for group in groups), metadata.num_rows)
    else:
        with path.open("rb") as stream:
            sample = stream.read(SAMPLE_BYTES)
        lines = max(sample.count(b"\n"), 1)
        size = Size(path.stat().st_size, path.stat().st_size * lines / max(len(sample), 1))
    share = 1.0 if max_rows is None else min(max_rows / max(size.rows, 1), 1.0)
    return Size(size.bytes * share, size.rows * share)


def read_columns(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Columns]:
    """{columns: the named values of a raw row}, None for a missing one; {} if no name is given.

    Raises:
        Defect: a value cannot be written as JSON, e.g. NaN, a date or bytes of a Parquet file.

    Example:
        >>> read_columns({"prompt": "2 + 2 =", "answer": "4"}, ["answer"])
        {'columns': {'answer': '4'}}
    """
    columns = {name: raw.get(name) for name in names}
    for name, value in columns.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError):
            raise Defect(f"`{name}` is {value!r:.40}; expected a value that JSON has") from None
    return {"columns": columns} if columns else {}


def share_columns(rows: list[SourceRow], names: Sequence[str]) -> None:
    """Give all rows with one prompt the same columns, because only one of them becomes the prompt
    that a policy is trained on: the first value of each column that is not None.

    Raises:
        BadInput: no row has one of the columns.
    """
    by_prompt: dict[str, Columns] = {}
    for row in rows:
        if "columns" in row:
            shared = by_prompt.setdefault(prompt_key(row["prompt"]), row["columns"])
            for name, value in row["columns"].items():
                if shared[name] is None:
                    shared[name] = value
            row["columns"] = shared
    for name in names:
        if by_prompt and all(columns[name] is None for columns in by_prompt.values()):
            raise BadInput(
                f"prepare.columns: no row of prepare.sources has `{name}`; correct the name"
            )


SHOWN = 5  # pairs of rows in an error message


def overlapping(
    eval_rows: Collection[SourceRow], train_rows: Collection[SourceRow]
) -> list[tuple[SourceRow, SourceRow]]:
    """Find training rows whose prompt equals a held-out prompt or begins with one.

    Returns:
        Pairs (held-out row, training row).
    """
    train = PromptIndex(row["prompt"] for row in train_rows)
    leaked = {prompt_key(row["prompt"]): row for row in eval_rows if train.has_start(row["prompt"])}
    if not leaked:
        return []
    keyed = [(prompt_key(row["prompt"]), row) for row in train_rows]
    return [
        (row, other)
        for start, row in leaked.items()
        for key, other in keyed
        if key == start or key.startswith(start + " ")
    ]


def check_no_prompt_overlap(
    eval_rows: Collection[SourceRow], train_rows: Collection[SourceRow]
) -> None:
    """Check that no training prompt equals a held-out prompt or begins with one."""
    if pairs := overlapping(eval_rows, train_rows):
        first = "\n".join(
            f"  held-out {held_out['where']} and training {train['where']}"
            for held_out, train in pairs[:SHOWN]
        )
        raise BadInput(
            f"{len(pairs)} training rows have the prompt of a held-out row or begin with it; "
            f"the first:\n{first}\nremove them from one of the sources"
        )


SUFFIXES = (".jsonl", ".parquet")


def source_sets(params: Params, tokenizer: Any, audit: Audit) -> DataSets:
    """Read the sources and split them by prompt: rows of `use: eval` and, for each kind of row
    without such a source, a share of the prompts are held out.

    Returns:
        The six data sets by name: sft, pairs and prompts, for train and for eval.

    Raises:
        Unreachable: a source is on the hub, which cannot be reached.
        BadInput: the rows do not fit into memory, too many are bad, or training rows have a
            held-out prompt.
    """
    config = params.prepare
    sources = listed_sources(params)
    check_memory(sources, config)
    rows = read_rows(sources, config, frozenset(tokenizer.all_special_tokens), audit)
    audit.check_bad_share(config.max_bad_share)
    rows = audit.drop_contradictions(rows)
    # held-out rows first: of duplicates the first one stays, so that no copy of it is trained on
    rows.sort(key=lambda row: row["use"] != "eval")
    rows = audit.drop_duplicates(rows, prompts_and_responses(rows), config.near_duplicate)
    rows = audit.drop_long_prompts(rows, (row["prompt"] for row in rows), tokenizer, config)
    rows = separate(rows, own_files=params.assets.data == "files", audit=audit)
    audit.rows_kept = len(rows)
    groups = prompt_groups(rows, config.near_duplicate)
    held_out = held_out_groups(rows, groups, config.eval_share, params.seed)

    has_demonstrations = any("completion" in row for row in rows)
    sets: DataSets = {}
    for part in ("train", "eval"):
        part_rows = [
            row
            for row, group in zip(rows, groups, strict=True)
            if (row["use"] == "eval" or group in held_out) == (part == "eval")
        ]
        pairs = [row for row in part_rows if "chosen" in row]
        demonstrations = (
            [row for row in part_rows if "completion" in row]
            if has_demonstrations
            else chosen_as_demonstrations(pairs)
        )
        sets[f"pairs_{part}"] = [
            with_id(row, "prompt", "chosen", "rejected", "margin", "source") for row in pairs
        ]
        sets[f"sft_{part}"] = [
            with_id(row, "prompt", "completion", "source") for row in demonstrations
        ]
        sets[f"prompts_{part}"] = [
            with_id(row, "prompt", "source", "columns")
            for row in reversed(dedupe_prompts(part_rows))
        ]
    return freeze_eval_prompts(sets, config.max_eval_prompts, params.seed)


def read_rows(
    sources: list[SourceParams], config: PrepareParams, special_tokens: frozenset[str], audit: Audit
) -> list[SourceRow]:
    """Read and normalise the rows of all sources; those with a Defect are recorded in the audit."""
    rows: list[SourceRow] = []
    for source in sources:
        source_rows = read_source(source, config.max_rows)
        audit.rows_read[source.path] += 0  # also of a file without rows
        for location, raw in tracked(f"reading {source.path}", source_rows, 0):
            audit.rows_read[source.path] += 1
            try:
                if isinstance(raw, Defect):
                    raise raw
                texts = normalise(
                    raw,
                    config.prompt_format,
                    special_tokens,
                    config.speaker_markers,
                    config.columns,
                )
                origin = {"where": location, "source": source.path, "use": source.use}
                columns = read_columns(raw, config.columns)
                rows.append(cast(SourceRow, texts | origin | columns))
                audit.ignored_columns.update(ignored_columns(raw, config.columns).keys())
                audit.conversations += is_conversation(raw)
            except Defect as defect:
                audit.record_drop(cause_of(defect), location, raw_text(raw), reason=str(defect))
    share_columns(rows, config.columns)
    return rows


def cause_of(defect: Defect) -> str:
    """The cause under which the audit counts a defect; only bad rows can end the stage."""
    if isinstance(defect, AnotherSpeaker):
        return ANOTHER_SPEAKER
    return TIE if isinstance(defect, Tie) else BAD


def freeze_eval_prompts(sets: DataSets, max_prompts: int, seed: int) -> DataSets:
    """Replace the held-out prompts by the evaluation prompts: at most `max_prompts`, at random,
    none of which is the beginning of a training prompt.
    """
    held_out = sets.pop("prompts_eval")
    train = PromptIndex(row["prompt"] for row in sets["prompts_train"])
    prompts: list[PromptRow] = [
        {"id": row["id"], "prompt": row["prompt"]}
        for row in held_out
        if not train.has_start(row["prompt"])
    ]
    random.Random(seed).shuffle(prompts)
    return {**sets, "eval_prompts": prompts[:max_prompts]}


def listed_sources(params: Params) -> list[SourceParams]:
    """The sources of prepare.sources, or the hub data set that the assets stage fetched."""
    if params.assets.data != "files":
        folder = ASSETS / "data"
        files = ((folder / "train.jsonl", "train"), (folder / "eval.jsonl", "eval"))
        return [SourceParams(path=str(path), use=use) for path, use in files if path.exists()]
    check_unchanged("data", params)
    return params.prepare.sources


def declared_files(params: Params) -> frozenset[str]:
    """The paths of the user's own held-out files: only the user can decide how to fix a leak from
    them.
    """
    sources = params.prepare.sources if params.assets.data == "files" else []
    return frozenset(source.path for source in sources if source.use == "eval")


def read_source(source: SourceParams, max_rows: int | None) -> Iterator[tuple[str, Any]]:
    """Read a source: (file:line, raw row); the raw row of a line that is not JSON is a Defect."""
    path = Path(source.path)
    if path.suffix == ".jsonl" and path.is_file():
        rows = read_json_lines(path)
    elif path.suffix == ".parquet" and path.is_file():
        rows = enumerate(parquet_rows(path), 1)
    elif path.suffix in SUFFIXES or path.exists() or source.path.count("/") != 1:
        raise BadInput(
            f"prepare.sources: {path}: expected a file ({' or '.join(SUFFIXES)}) or the hub id of a"
            " data set (name/name@commit)"
        )
    else:
        refused = f"no such file, and the hub does not give split {source.split}"
        splits = hub.load_data_set(source.path, "prepare.sources", refused, split=source.split)
        rows = enumerate(splits, 1)
    return ((f"{source.path}:{line}", row) for line, row in itertools.islice(rows, max_rows))


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of a .jsonl file; blank lines are skipped."""
    for number, line in read_lines(path, "correct or remove the line"):
        if line.strip() == b"[" or line.lstrip().startswith(b"[{"):
            raise BadInput(
                f"{path}:{number}: a JSON array; expected one JSON object per line: `jq -c '.[]'"
                f" {path} > new.jsonl` writes it so"
            )
        try:
            # halves of surrogate pairs are a Defect of the text that has them
            yield number, parse_json(line, surrogates=True)
        except ValueError as error:
            yield number, Defect(f"not JSON: {error}")


def separate(rows: list[SourceRow], own_files: bool, audit: Audit) -> list[SourceRow]:
    """Separate training rows from prompts that a source holds out: an overlap within the user's own
    files is an error, in a hub data set the training rows are dropped.

    Raises:
        BadInput: a training row of the user's own files has a held-out prompt.
    """
    eval_rows, train_rows = (
        [row for row in rows if row["use"] == use] for use in ("eval", "train")
    )
    if own_files:
        check_no_prompt_overlap(eval_rows, train_rows)
        return rows
    held_out_by_train = {
        train["where"]: held_out["where"] for held_out, train in overlapping(eval_rows, train_rows)
    }
    for location, held_out_location in held_out_by_train.items():
        audit.record_drop(SHARED_PROMPT, location, of=held_out_location)
    return [row for row in rows if row["where"] not in held_out_by_train]


def group_key(prompt: Prompt) -> str:
    """The key of prompts on the same side of the split: equal prompts, and conversations with the
    same first user turn.
    """
    if isinstance(prompt, str):
        return prompt_key(prompt.split("\n\nAssistant:")[0])
    user_turns = (message["content"] for message in prompt if message["role"] == "user")
    return prompt_key(next(user_turns, ""))


def prompt_groups(rows: Sequence[HasPrompt], similarity: float) -> list[str]:
    """The group of each row by its prompt; near-duplicate prompts are in one group."""
    keys = [group_key(row["prompt"]) for row in rows]
    distinct = list(dict.fromkeys(keys))
    group_indices = near_groups(distinct, similarity)
    group_of = {key: distinct[i] for key, i in zip(distinct, group_indices, strict=True)}
    return [group_of[key] for key in keys]


def held_out_groups(rows: list[SourceRow], groups: list[str], share: float, seed: int) -> set[str]:
    """The groups to hold out: a share for each kind of row (pairs, demonstrations) that no source
    holds out.
    """
    held_out: set[str] = set()
    for key in ("chosen", "completion"):
        of_kind = [(row, group) for row, group in zip(rows, groups, strict=True) if key in row]
        if of_kind and all(row["use"] == "train" for row, _ in of_kind):
            held_out |= hold_out((group for _, group in of_kind), share, seed)
    return held_out


def prompts_and_responses(rows: Sequence[HasPrompt]) -> list[tuple[str, str]]:
    """(prompt, all responses as one text) of each row."""
    texts = (list(source_texts(row)) for row in rows)
    return [(prompt, "\n".join(responses)) for prompt, *responses in texts]


def chosen_as_demonstrations(pairs: list[SourcePair]) -> list[SourceDemonstration]:
    """The distinct chosen responses as demonstrations."""
    distinct: dict[tuple[str, str], SourceDemonstration] = {
        (prompt_key(row["prompt"]), row["chosen"]): {
            "prompt": row["prompt"],
            "completion": row["chosen"],
            "where": row["where"],
            "source": row["source"],
            "use": row["use"],
        }
        for row in reversed(pairs)
    }
    return list(distinct.values())[::-1]


def with_id(row: Mapping[str, object], *names: str) -> PromptRow:
    """The named values that the row has; its id is its location."""
    values = {name: row[name] for name in names if name in row}
    return cast(PromptRow, {"id": row["where"], **values})


def raw_text(raw: Any) -> str:
    """A raw row as text, for the audit."""
    return str(raw) if isinstance(raw, Defect) else json.dumps(raw, ensure_ascii=False, default=str)
