"""Measures the KL of a round's policy from SFT with many samples: how far is it from the target?

`python bench/landing.py ROUND [SAMPLES, default 16]`, in the folder of a project with a finished
round. One line per set of prompts: those the policy was selected on, the frozen ones, and as many
of those it was trained on. KL is in nats per sequence with its standard error over prompts, whose
responses are not independent of each other; length is that of SFT's responses to the same prompts,
in tokens, and the target is `ppo.target_kl_per_token` times it.
"""

import sys
from contextlib import nullcontext
from statistics import fmean

import torch

from stages.evaluate.evaluator import Evaluator
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.rows import TrainingPrompt, read_rows
from stages.lib.core.types import TokenIds
from stages.lib.data.prompts import encode
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.loading import setup_torch
from stages.lib.lm.scoring import score_responses
from stages.lib.metrics.stats import mean_with_error
from stages.ppo.common.episodes import make_episodes

SEED = 987_654  # of no sample that selected or evaluated the policy


def main(round_: str, samples: int) -> None:
    params = load_params()
    setup_torch(params)
    evaluator = Evaluator(params, round_)
    policy, sft, tokenizer = evaluator.load_ppo(), evaluator.sft, evaluator.tokenizer
    ends, target = end_tokens(sft, tokenizer), params.ppo.target_kl_per_token

    def sampled(model: object, prompt_ids: list[TokenIds]) -> list[TokenIds]:
        generator = torch.Generator().manual_seed(SEED)
        return sample_responses(model, tokenizer, prompt_ids, params.ppo, generator, None)

    path = stage_dir(round_, "prepare") / "data/prompts_train.jsonl"
    rows = read_rows(TrainingPrompt, path, f"dvc repro prepare@{round_}")
    trained, held_out = (
        [ids for _, ids in part] for part in make_episodes(rows, tokenizer, params)
    )
    prompt_format = params.prepare.prompt_format
    frozen = [encode(tokenizer, prompt, None, prompt_format)[0] for prompt in evaluator.prompts]
    print("prompts      number  KL (error)    length (error)  target  off by (error)")
    for name, prompts in {
        "selected on": held_out,
        "frozen": frozen,
        "trained on": trained[: len(held_out)],
    }.items():
        repeated = prompts * samples
        responses = sampled(policy, repeated)
        scores = score_responses(
            policy,
            lambda: nullcontext(sft),
            repeated,
            responses,
            ends=ends,
            temperature=params.ppo.temperature,
        )
        kl = scores.kl.view(samples, len(prompts)).mean(0).tolist()
        lengths = [len(response) for response in sampled(sft, repeated)]
        of_prompts = [fmean(lengths[i :: len(prompts)]) for i in range(len(prompts))]
        off = [a - target * b for a, b in zip(kl, of_prompts, strict=True)]
        (mean, error), (length, length_error) = mean_with_error(kl), mean_with_error(of_prompts)
        miss, miss_error = mean_with_error(off)
        print(
            f"{name:11}  {len(prompts):6}  {mean:5.2f} ({error:.2f})  {length:6.2f} "
            f"({length_error:.2f})  {target * length:12.2f}  {miss:6.2f} ({miss_error:.2f})"
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 16)
