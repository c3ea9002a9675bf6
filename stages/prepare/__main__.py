"""The prepare stage: read the data, check and split them, and report what they are like.

Inputs: assets/data or prepare.sources, assets/model (the tokenizer), and the previous round's
replay/data and prepare/data.
Outputs: rounds/<round>/prepare/data with three training sets (sft_train, pairs_train,
prompts_train), three held-out sets (sft_eval, pairs_eval, eval_prompts) and audit.json; without a
reward model pairs may be missing, and demonstrations, too: then their two sets are empty files;
metrics.json, manifest.json; reports/<round>/data.json and data.html.
Run: `python -m stages.prepare --round r0`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.files import (
    ASSETS,
    REPORTS,
    is_placeholder,
    maker,
    stage_dir,
    write_json,
    write_jsonl,
    write_text,
)
from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.recorder import write_manifest
from stages.lib.core.rows import Demonstration, PreferencePair, PromptRow, TrainingPrompt, read_rows
from stages.lib.core.stage import stage_main
from stages.lib.data.prompts import open_thought, template_hash
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import (
    EVAL_FILES,
    HELD_OUT,
    TRAIN,
    DataSets,
    check_eval_set_unchanged,
    check_not_in_eval_set,
    evaluation_hash,
    prompt_key,
)
from stages.lib.dedup.contamination import check_no_leaks, leaks_by_set
from stages.prepare.audit import (
    ANOTHER_SPEAKER,
    BAD,
    CONTRADICTION,
    EXACT,
    LEAK,
    NEAR,
    SHOWN_COLUMNS,
    TIE,
    Audit,
    render_report,
)
from stages.prepare.shortcuts import languages, lengths, shortcuts
from stages.prepare.sources import declared_files, read_tokenizer, source_sets
from stages.prepare.tweets import tweet_sets

TWEETS = ASSETS / "data/tweets.tsv"
EXAMPLES = 3  # rows per set in the report


def main(params: Params, round_: str) -> None:
    """Make the training and held-out sets of a round.

    Raises:
        BadInput: the data cannot be used; the message names the rows and the next step.
    """
    folder, previous = stage_dir(round_, "prepare"), Path(params.rounds[round_].previous)
    audit, tokenizer = Audit(), read_tokenizer()
    rendering = template_hash(tokenizer, params.prepare.prompt_format)  # checks the chat template

    # 1. read, normalise, drop contradictions and duplicates, split by prompt
    sets = (
        tweet_sets(TWEETS, params, tokenizer, audit)
        if TWEETS.exists()
        else source_sets(params, tokenizer, audit)
    )

    for note in notes(audit, tokenizer, params.prepare.prompt_format):
        print(f"[prepare@{round_}] {note}", flush=True)

    # 2. drop training rows that contain held-out texts
    clear_leaks(sets, declared_files(params), params.prepare.near_duplicate, audit)
    check_rows_left(sets, params, audit)
    check_thoughts(sets, open_thought(tokenizer, params.prepare.prompt_format))

    # 3. add the previous round's replay to the training sets; no prompt of slices/ may be in them
    train = {name: sets[set_name] for name, set_name in TRAIN.items()}
    held_out = {name: sets[set_name] for name, set_name in HELD_OUT.items()}
    added = merge_replay(
        train, held_out, previous, params.replay.max_share, params.prepare.near_duplicate
    )
    replayed = {name: len(rows) for name, rows in added.items()}
    sets |= {TRAIN[name]: [*train[name], *rows] for name, rows in added.items()}
    check_not_in_slices(
        (f"{name} row {row['id']}: its prompt", row["prompt"])
        for name in TRAIN.values()
        for row in sets[name]
    )

    # 4. write the sets, and check that the held-out ones are those of the previous round
    for name, rows in sets.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    check_eval_set_unchanged(folder / "data", previous)

    # 5. write the audit, the report, metrics and manifest
    audit_report = {**audit.report(), "replayed": replayed}
    write_json(folder / "data" / "audit.json", audit_report)
    report = {
        **audit_report,
        **describe(sets, params.seed),
        "examples": {name: rows[:EXAMPLES] for name, rows in sets.items()},
    }
    write_json(REPORTS / round_ / "data.json", report)
    write_text(REPORTS / round_ / "data.html", render_report(report, round_))
    write_json(folder / "metrics.json", metrics(audit, sets, replayed))
    write_manifest(
        "prepare",
        round_,
        seed=params.seed,
        inputs=[ASSETS / "data", previous / "replay/data"],
        template_hash=rendering,
        prompt_format=params.prepare.prompt_format.value,
        evaluation_hash=evaluation_hash(folder / "data"),
        evaluation_files=list(EVAL_FILES),
    )
    counts = ", ".join(f"{name} {len(rows)}" for name, rows in sets.items())
    dropped = sum(audit.by_cause().values())
    print(
        f"[prepare@{round_}] {counts}; {sum(replayed.values())} of these rows replayed,"
        f" {dropped} rows dropped",
        flush=True,
    )


def notes(audit: Audit, tokenizer: Any, prompt_format: PromptFormat) -> Iterator[str]:
    """What of the data and of the model is not used, though it may have a meaning."""
    if audit.ignored_columns:
        names = (name for name, _ in audit.ignored_columns.most_common(SHOWN_COLUMNS))
        yield (
            f"ignored columns: {', '.join(names)} (a reward gets those that prepare.columns names)"
        )
    if audit.conversations and tokenizer.chat_template and prompt_format is PromptFormat.plain:
        yield (
            f"{audit.conversations} rows are conversations, and the model's chat template is not"
            " used: to use it, set prepare.prompt_format: chat"
        )


def clear_leaks(sets: DataSets, declared: frozenset[str], similarity: float, audit: Audit) -> None:
    """Drop training rows that contain a text of a held-out row.

    Args:
        sets: the six data sets; the training sets are replaced.
        declared: paths of the user's own held-out files.
        similarity: prepare.near_duplicate.
        audit: records the dropped rows.

    Raises:
        BadInput: the held-out row comes from a declared file, so only the user can decide which of
            the two rows to remove.
    """

    def is_declared(row: PromptRow) -> bool:
        return row["id"].rpartition(":")[0] in declared

    train = {name: sets[name] for name in TRAIN.values()}
    # declared rows first: only the first held-out row that a training row leaks is reported
    held_out = sorted(
        (row for name in HELD_OUT.values() for row in sets[name]),
        key=lambda row: not is_declared(row),
    )
    leaks = leaks_by_set(train, held_out, similarity)
    declared_leaks = [
        (train[name][leak.row]["id"], leak)
        for name in leaks
        for leak in leaks[name]
        if is_declared(leak.held_out)
    ]
    check_no_leaks(
        declared_leaks,
        "remove these rows from one of the two files: an evaluation on training rows is not"
        " meaningful",
    )
    for name, rows in train.items():
        sets[name] = audit.drop_leaks(name, rows, leaks[name])


def check_rows_left(sets: DataSets, params: Params, audit: Audit) -> None:
    """Check that no set is empty, but for a kind of rows that the data do not have, neither for
    training nor held out, and that no setting needs.

    Raises:
        BadInput: a set is empty.
    """
    absent = {kind for kind in TRAIN if not (sets[TRAIN[kind]] or sets[HELD_OUT[kind]])}
    if "pairs" in absent:
        params.check_pairs_not_needed()
    if "sft" in absent:
        params.check_demonstrations_not_needed()
    optional = {names[kind] for names in (TRAIN, HELD_OUT) for kind in absent - {"prompts"}}
    if empty := [name for name, rows in sets.items() if not rows and name not in optional]:
        raise BadInput(
            f"no rows left for {', '.join(empty)} (dropped: {audit.by_cause()}); add data, or"
            " change prepare.* in params.yaml"
        )


def check_thoughts(sets: DataSets, tag: str) -> None:
    """Check that most responses end the thought that the chat template begins, if it begins one.

    tag: of `open_thought`.

    Raises:
        BadInput: they do not, so that the answers would be learnt as thoughts.
    """
    responses = [row["completion"] for row in cast(Sequence[Demonstration], sets["sft_train"])]
    responses += [row["chosen"] for row in cast(Sequence[PreferencePair], sets["pairs_train"])]
    without = sum(f"</{tag}>" not in text for text in responses)
    if tag and without > len(responses) / 2:
        raise BadInput(
            f"prepare.prompt_format chat: the model's chat template begins each answer with <{tag}>"
            f", and {without} of {len(responses)} responses have no </{tag}>: they would be learnt "
            "as thoughts. For answers without thoughts, set prepare.chat_template_kwargs to "
            "{enable_thinking: false}, if the template reads it, or correct the template"
        )


def describe(sets: DataSets, seed: int) -> dict[str, Any]:
    """Sizes, lengths, languages and shortcuts of the sets, for the report."""
    train_pairs, held_out_pairs = (
        cast(Sequence[PreferencePair], sets[name]) for name in ("pairs_train", "pairs_eval")
    )
    texts = [
        row for name in ("pairs_train", "sft_train", "pairs_eval", "sft_eval") for row in sets[name]
    ]
    return {
        "sets": {
            name: {
                "rows": len(rows),
                "distinct_prompts": len({str(row["prompt"]) for row in rows}),
                "lengths": lengths(rows),
            }
            for name, rows in sets.items()
        },
        "languages": languages(texts or sets["prompts_train"], seed),
        "shortcuts": shortcuts(train_pairs, held_out_pairs, seed),
    }


def metrics(audit: Audit, sets: DataSets, replayed: dict[str, int]) -> dict[str, int]:
    """The content of metrics.json: numbers of rows."""
    causes = {
        "rows_bad": BAD,
        "ties": TIE,
        "another_speaker": ANOTHER_SPEAKER,
        "contradictions": CONTRADICTION,
        "exact_duplicates": EXACT,
        "near_duplicates": NEAR,
    }
    return {
        "rows_read": sum(audit.rows_read.values()),
        "rows_kept": audit.rows_kept,
        **{name: audit.count(cause) for name, cause in causes.items()},
        "leaks": audit.count(LEAK),
        **{name: len(rows) for name, rows in sets.items()},
        "replayed": sum(replayed.values()),
    }


def merge_replay(
    train: DataSets, held_out: DataSets, previous: Path, max_share: float, similarity: float
) -> DataSets:
    """The previous round's replayed rows that are added to the training sets.

    Args:
        train: this round's rows by file name without suffix (sft, pairs, prompts).
        held_out: the evaluation rows, likewise.
        previous: folder of the previous round.
        max_share: of replayed rows in each merged set, 0 to 1.
        similarity: prepare.near_duplicate.

    Returns:
        The rows to add to each set. Prompts have the columns that the data have for them.

    Raises:
        BadInput: a replayed row has an evaluation prompt, or leaks a held-out text
            (stages/lib/dedup/contamination.py).
    """
    folder = previous / "replay/data"
    if is_placeholder(folder):
        return dict.fromkeys(train, ())
    replayed: DataSets = {
        "sft": read_rows(Demonstration, folder / "sft.jsonl"),
        "pairs": read_rows(PreferencePair, folder / "pairs.jsonl"),
        "prompts": with_columns(
            read_rows(TrainingPrompt, folder / "prompts.jsonl"),
            cast(Sequence[TrainingPrompt], train["prompts"]),
        ),
    }

    # All rows are checked, also those beyond max_share: replay must never produce such rows.
    rows = [row for name in replayed for row in replayed[name]]
    locations = [
        f"{folder / name}.jsonl:{line}"
        for name in replayed
        for line in range(1, len(replayed[name]) + 1)
    ]
    check_not_in_eval_set(
        (
            (f"{location}: its prompt", row["prompt"])
            for location, row in zip(locations, rows, strict=True)
        ),
        held_out["prompts"],
        f"if seed or data changed since {previous.name}, `rondo run --rerun all` makes all rounds "
        "again; else remove the row",
    )
    held_out_rows = [row for name in held_out for row in held_out[name]]
    leaks = leaks_by_set({"replayed": rows}, held_out_rows, similarity)["replayed"]
    check_no_leaks(
        [(locations[leak.row], leak) for leak in leaks],
        f"run `{maker(folder)}` again, which drops such rows, or remove them",
    )

    # a kind of rows that the data do not have stays without rows
    replayed = {name: rows if train[name] else () for name, rows in replayed.items()}
    if max_share == 1:
        return replayed
    # the largest number with added / (own rows + added) <= max_share
    most = {name: int(max_share * len(rows) / (1 - max_share)) for name, rows in train.items()}
    return {name: rows[: most[name]] for name, rows in replayed.items()}


def with_columns(
    replayed: Sequence[TrainingPrompt], own: Sequence[TrainingPrompt]
) -> list[TrainingPrompt]:
    """Give replayed prompts the further columns (`prepare.columns`) of the data's same prompts.

    Without them, a reward that needs e.g. the exact answer would fail.
    """
    columns = {prompt_key(row["prompt"]): row["columns"] for row in own if "columns" in row}
    return [
        {**row, "columns": columns[key]} if (key := prompt_key(row["prompt"])) in columns else row
        for row in replayed
    ]


if __name__ == "__main__":
    stage_main("prepare", main)
