"""The policy's evaluation once more, in a fresh process, from the files on disk.

`python -m stages.evaluate.reproduce ROUND PARAMS.json` prints the first sample of each prompt as a
JSON list.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt, Sample
from stages.lib.core.errors import RondoError
from stages.lib.core.files import read_json, stage_dir, work_dir, write_json
from stages.lib.core.fresh_process import run_in_fresh_process
from stages.lib.core.params import Params, check_params
from stages.lib.lm.loading import setup_torch


def rerun_policy(params: Params, round_: str) -> OneSamplePerPrompt:
    """The policy's first sample of each prompt, by a fresh process with the same params.

    Raises:
        RondoError: the process failed; with the end of its standard error.
    """
    settings = work_dir(round_, "evaluate") / "params.json"
    write_json(settings, params.model_dump(mode="json"))
    policy = stage_dir(round_, "ppo") / "policy"
    rows = run_in_fresh_process(
        "stages.evaluate.reproduce",
        round_,
        settings,
        failing=f"{policy} cannot be evaluated a second time",
    )
    return [Sample(**row) for row in rows]


def check_reproduced(first: OneSamplePerPrompt, second: OneSamplePerPrompt) -> None:
    """Check that two evaluations of one policy are equal.

    The same weights in the same batches have to give the same bits.

    Raises:
        RondoError: a text, score or KL differs.
    """
    differing = [index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if differing:
        a, b = first[differing[0]], second[differing[0]]
        raise RondoError(
            f"evaluate: in a fresh process the policy differs on {len(differing)} of "
            f"{len(first)} prompts, first on {differing[0]}: "
            f"{a.text!r} (score {a.score:.4f}, KL {a.kl:.4f}) and then "
            f"{b.text!r} (score {b.score:.4f}, KL {b.kl:.4f}). "
            "Look for a source of randomness without a seed, or files that changed meanwhile"
        )


def main(round_: str, settings: Path) -> None:
    params = check_params(read_json(settings, f"dvc repro evaluate@{round_}"), str(settings))
    setup_torch(params)
    evaluator = Evaluator(params, round_)
    print(json.dumps([asdict(sample) for sample in evaluator.sample(evaluator.load_ppo(), 0)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
