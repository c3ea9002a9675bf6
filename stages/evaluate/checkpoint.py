"""Evaluate one checkpoint as the policy was evaluated, outside the DAG.

A checkpoint of PPO, or another model, is compared with SFT and the policy on the frozen prompts,
with the same random numbers, reward model and jury: would another one have been better? Writes
reports/<round>/checkpoint_<name>_<hash>.json, and .jsonl with the samples; no stage reads them.

Run: `python -m stages.evaluate.checkpoint --round r0 --checkpoint step_00010`.
"""

import argparse
import sys
from pathlib import Path

from stages.evaluate.comparability import eval_set_hash, evaluation_id, evaluation_settings
from stages.evaluate.evaluator import Evaluator
from stages.evaluate.results import ModelResults, side_by_side, with_intervals
from stages.lib.core.ended_rounds import has_ended, params_of
from stages.lib.core.errors import print_failure
from stages.lib.core.files import (
    REPORTS,
    file_hash,
    find_checkpoint,
    write_json,
    write_jsonl,
)
from stages.lib.core.params import Params
from stages.lib.core.progress import reporting
from stages.lib.core.recorder import read_metrics
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.judging.loading import base_model, load_jury
from stages.lib.lm.loading import check_same_tokens, load_policy, setup_torch


def main(params: Params, round_: str, checkpoint: str) -> Path:
    """Evaluate a checkpoint; returns the path of its report."""
    path = find_checkpoint(round_, checkpoint)
    setup_torch(params)
    if not has_ended(round_):  # the recorded hashes are those of params.yaml's settings
        check_unchanged("judges", params)
    settings = evaluation_settings(params, eval_set_hash(round_))
    losses = read_metrics(round_, "sft")
    evaluator = Evaluator(params, round_)
    otherwise = "`rondo compare-models`, which gives both models the texts"
    check_same_tokens(path, evaluator.tokenizer, "--checkpoint", otherwise)
    jury = load_jury(params, round_, base_model(params))
    results = ModelResults(evaluator, jury, losses, f"checkpoint@{round_}")
    models = {
        "sft": evaluator.sft,
        "ppo": evaluator.load_ppo(),
        "checkpoint": load_policy(evaluator.sft_path, path, params.model),
    }
    for name, model in models.items():
        results.add_model(name, model, params.evaluate.samples_per_prompt)
    results.win_rates("ppo", "sft")  # a judge that only compares scores a policy against SFT
    intervals = {
        f"{name}_{other}": interval
        for other in ("sft", "ppo")
        for name, interval in results.win_rates("checkpoint", other).items()
    }
    weights = file_hash(path)
    report = REPORTS / round_ / f"checkpoint_{path.name}_{weights[:8]}.json"
    write_jsonl(report.with_suffix(".jsonl"), side_by_side(evaluator.rows, results))
    write_json(
        report,
        {
            "round": round_,
            "path": str(path),
            "hash": weights,
            "evaluation_id": evaluation_id(settings),
            **results.metrics,
            **with_intervals(intervals),
        },
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m stages.evaluate.checkpoint")
    parser.add_argument("--round", required=True, help="round of params.yaml, e.g. r0")
    parser.add_argument(
        "--checkpoint", required=True, help="e.g. step_00010, or the folder of a model"
    )
    options = parser.parse_args()
    try:
        with reporting(f"checkpoint@{options.round}"):
            path = main(params_of(options.round), options.round, options.checkpoint)
        print(path)
    except Exception as error:
        sys.exit(print_failure(error, f"checkpoint@{options.round}"))
