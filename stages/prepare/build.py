"""The prepare stage, top to bottom."""

from pathlib import Path
from typing import Any

from stages.errors import BadInput
from stages.params import Params
from stages.prepare.audit import Audit
from stages.prepare.formats import source_texts
from stages.prepare.sources import source_sets
from stages.prepare.split import FROZEN, check_frozen, evaluation_hash, merge_replay
from stages.prepare.tweets import tweet_sets
from stages.prompts import template_hash
from stages.records import ASSETS, REPORTS, Row, stage_dir, write_json, write_jsonl, write_manifest

MODEL, TWEETS = ASSETS / "model", ASSETS / "data/tweets.tsv"
TRAIN = ("sft", "pairs", "prompts")
EXAMPLES = 3


def build(params: Params, round_: str) -> None:
    """The stage.

    Raises:
        BadInput: see the steps.
    """
    folder, audit, previous = stage_dir(round_, "prepare"), Audit(), Path(params.rounds[round_].previous)
    tokenizer = read_tokenizer()

    # 1. load, normalise, drop duplicates, split by prompt
    sets = tweet_sets(TWEETS, params, tokenizer, audit) if TWEETS.exists() else source_sets(params, tokenizer, audit)
    if empty := [name for name, rows in sets.items() if not rows]:
        raise BadInput(f"no rows left for {', '.join(empty)} (dropped: {dict(audit.dropped)}); add data, or see prepare.* in params.yaml")

    # 2. merge the previous round's replay into the training files
    replayed = merge_replay({name: sets[f"{name}_train"] for name in TRAIN}, sets["eval_prompts"], previous, params.replay.max_share)

    # 3. write, and check that the evaluation set is the previous round's
    for name, rows in sets.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    check_frozen(folder / "data", previous)
    report = {**audit.report(), "replayed": replayed, "sets": {name: describe(rows) for name, rows in sets.items()}}
    write_json(folder / "data" / "audit.json", report)
    write_json(REPORTS / round_ / "data.json", {**report, "examples": {name: rows[:EXAMPLES] for name, rows in sets.items()}})
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
        evaluation_files=list(FROZEN),
    )
    counts = ", ".join(f"{name} {len(rows)}" for name, rows in sets.items())
    print(f"[prepare@{round_}] {counts}, of them replayed {sum(replayed.values())}", flush=True)


def read_tokenizer() -> Any:
    """The base model's tokenizer; without the weights, so that preparing data stays quick."""
    if not (MODEL / "tokenizer.json").exists():
        raise BadInput(f"{MODEL}/tokenizer.json is missing: run `dvc repro assets`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def describe(rows: list[Row]) -> dict[str, float]:
    """Rows, and the mean number of words of prompt and responses."""
    words = sum(len(text.split()) for row in rows for text in source_texts(row))
    return {"rows": len(rows), "distinct_prompts": len({str(row["prompt"]) for row in rows}), "mean_words": round(words / len(rows), 2)}


def metrics(audit: Audit, sets: dict[str, list[Row]], replayed: dict[str, int]) -> dict[str, int]:
    return {
        "rows_read": sum(audit.rows_read.values()),
        "rows_bad": len(audit.bad),
        "exact_duplicates": len(audit.exact_duplicates),
        "near_duplicates": len(audit.near_duplicates),
        **{name: len(rows) for name, rows in sets.items()},
        "replayed": sum(replayed.values()),
    }
