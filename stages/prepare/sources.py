"""Read the users' own data: files, hub data sets, and the hub data set fetched by assets."""

import itertools
import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, read_json
from stages.lib.core.model_folders import damage_named
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.progress import tracked
from stages.lib.core.rows import Columns, HasPrompt, PromptRow
from stages.lib.core.types import Prompt, Row
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.splits import (
    DataSets,
    PromptIndex,
    dedupe_prompts,
    hold_out,
    prompt_key,
)
from stages.lib.dedup.duplicates import near_groups
from stages.prepare.audit import ALONE, ANOTHER_SPEAKER, BAD, SHARED_PROMPT, TIE, Audit
from stages.prepare.files import check_memory, local_files, read_source
from stages.prepare.formats import Format, find_form, ignored_columns, trl_rows
from stages.prepare.normalise import (
    SAME,
    AnotherSpeaker,
    SourceDemonstration,
    SourcePair,
    SourceRow,
    normalise,
    source_texts,
)
from stages.prepare.turns import TRANSCRIPT, Alone, Defect, Tie


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


def read_tokenizer() -> Any:
    """The base model's tokenizer.

    Raises:
        BadInput: assets/model has no tokenizer.
    """
    if not (MODEL / "tokenizer.json").exists():
        raise BadInput(f"{MODEL}/tokenizer.json is missing: run `dvc repro assets`")
    import transformers

    # AutoTokenizer returns the same class, but first reads the model's configuration, which imports
    # torch: 3 seconds
    config = read_json(MODEL / "tokenizer_config.json")
    is_backend = config.get("tokenizer_class") == "TokenizersBackend"
    cls = transformers.TokenizersBackend if is_backend else transformers.AutoTokenizer
    with damage_named(MODEL):
        tokenizer = cls.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)
        tokenizer("x")  # of a damaged config, some values show only here
    return tokenizer


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
            else chosen_as_demonstrations(cast(list[SourcePair], pairs))
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


MODEL = ASSETS / "model"


class Reading(NamedTuple):
    """What becomes of a row of a source, or of one of the pairs in it."""

    where: str  # file:line
    raw: Any
    row: Row  # normalised; empty if it cannot be used
    defect: Defect | None = None  # why it cannot be used
    form: Format | None = None
    ignored: tuple[str, ...] = ()  # columns that nothing reads
    is_conversation: bool = False  # it has messages or a transcript


def readings(
    rows: Iterable[tuple[str, Any]],
    columns: Mapping[str, str],
    config: PrepareParams,
    special_tokens: frozenset[str] = frozenset(),
) -> Iterator[Reading]:
    """What becomes of the (file:line, row) of a source, whose names of columns are `columns`."""
    rated: dict[str, list[Reading]] = {}
    for where, raw in rows:
        for reading in _of_row(where, raw, columns, config, special_tokens):
            if "rating" in reading.row:
                rated.setdefault(prompt_key(reading.row["prompt"]), []).append(reading)
            else:
                yield reading
    for responses in rated.values():
        yield from compared(responses)


def _of_row(
    where: str,
    raw: Any,
    columns: Mapping[str, str],
    config: PrepareParams,
    special_tokens: frozenset[str],
) -> Iterator[Reading]:
    reading = Reading(where, raw, {})
    try:
        if isinstance(raw, Defect):
            raise raw
        form, named = find_form(raw, columns, config.columns)
        ignored = ignored_columns(named, form, config.columns)
        reading = reading._replace(form=form, ignored=tuple(ignored))
        rows, further = trl_rows(form, named), read_columns(raw, config.columns)
    except Defect as defect:
        yield reading._replace(defect=defect)
        return
    for number, row in enumerate(rows, 1):
        location = where if len(rows) == 1 else f"{where}.{number}"
        try:
            if isinstance(row, Defect):
                raise row
            texts = normalise(
                row, config.prompt_format, special_tokens, config.speaker_markers, ignored
            )
            flag = is_conversation(row)
            yield reading._replace(where=location, row=texts | further, is_conversation=flag)
        except Defect as defect:
            yield reading._replace(where=location, defect=defect)


def is_conversation(row: Row) -> bool:
    """Whether a row has messages or a transcript."""
    return any(
        isinstance(value, list) or (isinstance(value, str) and bool(TRANSCRIPT.match(value)))
        for value in (row.get("prompt"), row.get("chosen"), row.get("completion"))
    )


def compared(responses: Sequence[Reading]) -> Iterator[Reading]:
    """Pairs of the rated responses to one prompt, and those with a good label as demonstrations."""
    for reading in responses:
        if reading.row["rating"] is True:
            good = {name: value for name, value in reading.row.items() if name != "rating"}
            yield reading._replace(row=good)
        elif len(responses) == 1:
            defect = Alone("there is no other response to its prompt")
            yield reading._replace(row={}, defect=defect)
    for one, other in itertools.combinations(responses, 2):
        better, worse = sorted((one, other), key=lambda reading: -reading.row["rating"])
        location = f"{better.where}-{worse.where.rpartition(':')[2]}"
        texts = {"chosen": better.row["completion"], "rejected": worse.row["completion"]}
        rest = {key: better.row[key] for key in better.row if key not in ("completion", "rating")}
        if one.row["rating"] == other.row["rating"]:
            tie = Tie("two responses have the same rating")
            yield better._replace(where=location, row={}, defect=tie)
        elif prompt_key(texts["chosen"]) == prompt_key(texts["rejected"]):
            yield better._replace(where=location, row={}, defect=Tie(SAME))
        else:
            yield better._replace(where=location, row=rest | texts)


def read_rows(
    sources: list[SourceParams], config: PrepareParams, special_tokens: frozenset[str], audit: Audit
) -> list[SourceRow]:
    """Read and normalise the rows of all sources; those with a Defect are recorded in the audit."""
    rows: list[SourceRow] = []
    for source in sources:
        raw_rows = audit.counted(source.path, read_source(source, config.max_rows))
        parsed = readings(raw_rows, source.columns, config, special_tokens)
        for reading in tracked(f"reading {source.path}", parsed, 0):
            if defect := reading.defect:
                text = raw_text(reading.raw)
                audit.record_drop(cause_of(defect), reading.where, text, reason=str(defect))
                continue
            origin = {"where": reading.where, "source": source.path, "use": source.use}
            rows.append(cast(SourceRow, reading.row | origin))
            audit.ignored_columns.update(reading.ignored)
            audit.conversations += reading.is_conversation
    share_columns(rows, config.columns)
    return rows


def cause_of(defect: Defect) -> str:
    """The cause under which the audit counts a defect; only bad rows can end the stage."""
    causes = {AnotherSpeaker: ANOTHER_SPEAKER, Tie: TIE, Alone: ALONE}
    return next((causes[kind] for kind in causes if isinstance(defect, kind)), BAD)


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
    held_out = [source for source in sources if source.use == "eval"]
    files = (str(file) for source in held_out for file in local_files(source))
    return frozenset([*files, *(source.path for source in held_out)])


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
    """The groups to hold out: a share for each kind of row (pairs, demonstrations, prompts) that no
    source holds out.
    """
    held_out: set[str] = set()
    for kind in KINDS:
        of_kind = [
            (row, group) for row, group in zip(rows, groups, strict=True) if kind_of(row) == kind
        ]
        if of_kind and all(row["use"] == "train" for row, _ in of_kind):
            held_out |= hold_out((group for _, group in of_kind), share, seed)
    return held_out


KINDS = {"chosen": "pairs", "completion": "demonstrations", "prompt": "prompts alone"}  # by key


def kind_of(row: HasPrompt) -> str:
    """The key that only rows of its kind have: `chosen`, `completion`, or `prompt`."""
    return next(key for key in KINDS if key in row)


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
