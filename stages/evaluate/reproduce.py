"""The policy's evaluation once more, in a fresh process, from the files on disk.

`python -m stages.evaluate.reproduce ROUND PARAMS.json` prints the first sample of each prompt as a
JSON list.
"""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt, Sample
from stages.lib.core.errors import RondoError
from stages.lib.core.files import read_json, stage_dir, work_dir, write_json
from stages.lib.core.fresh_process import run_in_fresh_process
from stages.lib.core.params import Params, check_params
from stages.lib.core.processes import share_out
from stages.lib.core.progress import reporting, reporting_to_parent
from stages.lib.lm import world
from stages.lib.lm.loading import setup_torch

# Of two evaluations on a GPU or by vLLM: the share of texts that may differ, and the difference of
# numbers of equal texts, in standard deviations (score) and nats; bfloat16 has 8 bits
MAX_OTHER_TEXTS, TOLERANCE = 0.05, 0.05


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


def is_exact(params: Params, device: torch.device) -> bool:
    """Whether two evaluations have to agree bit for bit: on a CPU, sampled without vLLM."""
    return device.type == "cpu" and not params.model.use_vllm


def check_reproduced(first: OneSamplePerPrompt, second: OneSamplePerPrompt, exact: bool) -> str:
    """Check that two evaluations of one policy are equal.

    On a CPU the same weights in the same batches have to give the same bits. On a GPU some sums
    have no fixed order (torch.cumsum among them), and vLLM forms its batches as requests come and
    go, so that a token may rarely be another one: a small share of texts may differ, and the
    numbers of the others only have to be close.

    Returns:
        What was compared, in one sentence.

    Raises:
        RondoError: a text, score or KL differs, or if not `exact` more than MAX_OTHER_TEXTS of the
            texts or a number by more than TOLERANCE.
    """
    pairs = list(zip(first, second, strict=True))
    differing = [index for index, (a, b) in enumerate(pairs) if a != b]
    compared = f"texts and numbers of all {len(pairs)} prompts are equal bit for bit"
    if not exact:
        others = [index for index in differing if pairs[index][0].tokens != pairs[index][1].tokens]
        if len(others) <= MAX_OTHER_TEXTS * len(pairs):
            differing = [i for i in differing if i not in others and not are_close(*pairs[i])]
        compared = (
            f"{len(pairs) - len(others)} of {len(pairs)} texts are equal (at least "
            f"{1 - MAX_OTHER_TEXTS:.0%} have to be), their numbers within {TOLERANCE}"
        )
    if differing:
        a, b = pairs[differing[0]]
        raise RondoError(
            f"evaluate: in a fresh process the policy differs on {len(differing)} of "
            f"{len(first)} prompts, first on {differing[0]}: "
            f"{a.text!r} (score {a.score}, KL {a.kl:.4f}) and then "
            f"{b.text!r} (score {b.score}, KL {b.kl:.4f}). "
            "Look for a source of randomness without a seed, or files that changed meanwhile"
        )
    return compared


def are_close(a: Sample, b: Sample) -> bool:
    """Whether score, KL and log-probability differ by at most TOLERANCE, absolute or relative."""
    return all(
        math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for x, y in (
            (a.score or 0.0, b.score or 0.0),  # both None without a reward model
            (a.kl, b.kl),
            (a.ref_logprob, b.ref_logprob),
        )
    )


def main(round_: str, settings: Path) -> None:
    params = check_params(read_json(settings), str(settings))
    # as many as before: the parts of a batch that are computed alone are rounded otherwise
    arguments = [round_, str(settings)]
    share_out("stages.evaluate.reproduce", arguments, params, "evaluate", round_)
    setup_torch(params)
    report = reporting_to_parent if world.is_main() else reporting
    with report(f"evaluate@{round_}"):
        evaluator = Evaluator(params, round_)
        samples = evaluator.sample(evaluator.load_ppo(), 0)
    print(json.dumps([asdict(sample) for sample in samples]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
