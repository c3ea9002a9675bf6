"""Compares the policy of a round with that of another run, at equal KL and as they are.

`python docs/bench/compare_policies.py ROUND OTHER`, in the folder of a project with a
finished round. OTHER is the folder of another project whose round of that name has the same
evaluation set, e.g. a clone that ran with `--set replay.max_share=0`. Prints JSON: the win rates of
this project's policy by the jury, with 95% intervals, and the metrics of all models; the other
project's policy is called `champion`. KL is that from the first round's SFT model of this project;
it should be the same in both.
"""

import json
import sys
from pathlib import Path

from stages.evaluate.evaluator import Evaluator
from stages.evaluate.results import ModelResults, compare_with_champion
from stages.lib.core.champion import Champion
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.recorder import read_metrics
from stages.lib.core.types import Metrics
from stages.lib.judging.loading import base_model, load_jury
from stages.lib.lm.loading import setup_torch


def compare(round_: str, other: Path) -> Metrics:
    params = load_params()
    setup_torch(params)
    frozen = stage_dir(round_, "prepare") / "data/eval_prompts.jsonl"
    for path in (frozen, other / frozen):
        if not path.exists():
            raise SystemExit(f"{path} is missing: expected a project with a finished {round_}")
    if frozen.read_bytes() != (other / frozen).read_bytes():
        raise SystemExit(f"{other / frozen} has other prompts than {frozen}")
    evaluator = Evaluator(params, round_)
    jury = load_jury(params, round_, base_model(params))
    results = ModelResults(evaluator, jury, read_metrics(round_, "sft"), f"compare@{round_}")
    paths = (
        other / stage_dir(round_, "sft") / "model",
        other / stage_dir(round_, "ppo") / "policy",
    )
    for name, model in {"sft": evaluator.sft, "ppo": evaluator.load_ppo()}.items():
        results.add_model(name, model, params.evaluate.samples_per_prompt)
    comparisons = compare_with_champion(results, Champion(str(other), *paths))
    return {**comparisons, **results.metrics}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(json.dumps(compare(sys.argv[1], Path(sys.argv[2]))))
