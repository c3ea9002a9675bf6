"""The prepare stage, top to bottom."""

from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.files import (
    ASSETS,
    REPORTS,
    read_json,
    stage_dir,
    write_json,
    write_jsonl,
    write_text,
)
from stages.lib.core.params import Params
from stages.lib.core.recorder import write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row
from stages.lib.data.prompts import template_hash
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import (
    EVAL_FILES,
    HELD_OUT,
    TRAIN,
    check_eval_set_unchanged,
    evaluation_hash,
)
from stages.lib.dedup.contamination import check_no_leaks, leaks_by_set
from stages.prepare.audit import BAD, CONTRADICTION, EXACT, LEAK, NEAR, TIE, Audit
from stages.prepare.merge_replay import merge_replay
from stages.prepare.report import page
from stages.prepare.shortcuts import languages, lengths, shortcuts
from stages.prepare.sources import declared_files, source_sets
from stages.prepare.tweets import tweet_sets

MODEL, TWEETS = ASSETS / "model", ASSETS / "data/tweets.tsv"
EXAMPLES = 3


def main(params: Params, round_: str) -> None:
    """The stage.

    Raises:
        BadInput: see the steps.
    """
    folder, audit, previous = (
        stage_dir(round_, "prepare"),
        Audit(),
        Path(params.rounds[round_].previous),
    )
    tokenizer = read_tokenizer()

    # 1. load, normalise, drop contradictions and duplicates, split by prompt
    sets = (
        tweet_sets(TWEETS, params, tokenizer, audit)
        if TWEETS.exists()
        else source_sets(params, tokenizer, audit)
    )

    # 2. leave nothing of the held-out texts in the training files
    clear_leaks(sets, declared_files(params), params.prepare.near_duplicate, audit)
    if empty := [name for name, rows in sets.items() if not rows]:
        raise BadInput(
            f"no rows left for {', '.join(empty)} (lost: {audit.by_cause()}); add data, or see prepare.* in params.yaml"
        )

    # 3. merge the previous round's replay into the training files; nothing of slices/ may be in
    # them
    train, held_out = (
        {name: sets[file] for name, file in files.items()} for files in (TRAIN, HELD_OUT)
    )
    replayed = merge_replay(
        train, held_out, previous, params.replay.max_share, params.prepare.near_duplicate
    )

    check_not_in_slices(
        (f"{name} row {row['id']}: its prompt", row["prompt"])
        for name in TRAIN.values()
        for row in sets[name]
    )

    # 4. write, and check that the evaluation set is the previous round's
    for name, rows in sets.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    check_eval_set_unchanged(folder / "data", previous)

    # 5. report: what was lost beside the data, and what the data are like
    lost = {**audit.report(), "replayed": replayed}
    write_json(folder / "data" / "audit.json", lost)
    report = {
        **lost,
        **describe(sets, params.seed),
        "examples": {name: rows[:EXAMPLES] for name, rows in sets.items()},
    }
    write_json(REPORTS / round_ / "data.json", report)
    write_text(REPORTS / round_ / "data.html", page(report, round_))
    write_json(folder / "metrics.json", metrics(audit, sets, replayed))
    write_manifest(
        folder,
        stage="prepare",
        round_=round_,
        seed=params.seed,
        inputs=[ASSETS / "data", previous / "replay/data"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        prompt_format=params.prepare.prompt_format.value,
        evaluation_hash=evaluation_hash(folder / "data"),
        evaluation_files=list(EVAL_FILES),
    )
    counts = ", ".join(f"{name} {len(rows)}" for name, rows in sets.items())
    print(
        f"[prepare@{round_}] {counts}, of them replayed {sum(replayed.values())}; lost {sum(audit.by_cause().values())}",
        flush=True,
    )


def read_tokenizer() -> Any:
    """The base model's tokenizer; without the weights, so that preparing data stays quick."""
    if not (MODEL / "tokenizer.json").exists():
        raise BadInput(f"{MODEL}/tokenizer.json is missing: run `dvc repro assets`")
    import transformers

    # AutoTokenizer would come to the same class, but reads the model's configuration first, which
    # imports torch: 3 seconds
    plain = (
        read_json(MODEL / "tokenizer_config.json", "dvc repro assets").get("tokenizer_class")
        == "TokenizersBackend"
    )
    kind = transformers.TokenizersBackend if plain else transformers.AutoTokenizer
    return kind.from_pretrained(MODEL, local_files_only=True)


def clear_leaks(
    sets: dict[str, list[Row]], declared: frozenset[str], similarity: float, audit: Audit
) -> None:
    """Drop from the training sets what is in a held-out one, where both were made here.

    Raises:
        BadInput: it is in one of the user's `declared` files of held-out rows.
    """

    def is_declared(row: Row) -> bool:
        return row["id"].rpartition(":")[0] in declared

    train = {name: sets[name] for name in TRAIN.values()}
    held_out = sorted(
        (row for name in HELD_OUT.values() for row in sets[name]),
        key=lambda row: not is_declared(row),
    )
    leaks = leaks_by_set(train, held_out, similarity)
    check_no_leaks(
        [
            (train[name][leak.row]["id"], leak)
            for name, some in leaks.items()
            for leak in some
            if is_declared(leak.held_out)
        ],
        "remove these rows from one of the two files: of what was trained on, an evaluation says nothing",
    )
    for name, rows in train.items():
        sets[name] = audit.drop_leaks(name, rows, leaks[name])


def describe(sets: dict[str, list[Row]], seed: int) -> dict[str, Any]:
    """What the sets are like."""
    everything = [
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
        "languages": languages(everything, seed),
        "shortcuts": shortcuts(sets["pairs_train"], sets["pairs_eval"], seed),
    }


def metrics(audit: Audit, sets: dict[str, list[Row]], replayed: dict[str, int]) -> dict[str, int]:
    counted = {
        "rows_bad": BAD,
        "ties": TIE,
        "contradictions": CONTRADICTION,
        "exact_duplicates": EXACT,
        "near_duplicates": NEAR,
    }
    return {
        "rows_read": sum(audit.rows_read.values()),
        "rows_kept": audit.rows_kept,
        **{name: audit.count(cause) for name, cause in counted.items()},
        "leaks": audit.count(LEAK),
        **{name: len(rows) for name, rows in sets.items()},
        "replayed": sum(replayed.values()),
    }


if __name__ == "__main__":
    stage_main("prepare", main)
