"""What each of two processes does in test_world.py; the main one prints its results as JSON."""

import json
import sys
from contextlib import nullcontext
from threading import Lock
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.launch import end_with_agent
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.generation import generate
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.responses import Response, score_responses
from stages.lib.lm.scoring import member_scores
from stages.lib.lm.world import CPU_BATCH_TOKENS
from tests.conftest import TINY

# more tokens than one batch has, so that each process gets some
TEXTS = [[5 + n % 30] * (40 + n % 9) for n in range(2 * CPU_BATCH_TOKENS // 48)]


def scores_and_samples() -> dict[str, object]:
    """Results of the functions that share their work."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.2)).eval()
    reference = LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.2)).eval()
    reward_model = LlamaForSequenceClassification(LlamaConfig(**TINY, num_labels=1)).eval()
    responses = generate(
        model,
        [[5, 6], [7], [8, 9, 10]],
        response_length=6,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        ends=EndTokens(2),
    )
    reward_model.config.mean, reward_model.config.std = 0.0, 1.0
    scored = score_responses(
        [Response(text, [7, 8], "", ended=False) for text in TEXTS],
        model,
        lambda: nullcontext(reference),
        SimpleNamespace(eos_token_id=2),
        reward_model=reward_model,
        temperature=1.0,
    )
    logprobs = token_logprobs(model, TEXTS, [[7, 8]] * len(TEXTS))
    return {
        "responses": responses,
        "scores": member_scores(reward_model, TEXTS).tolist(),
        "scored": [vars(response) for response in scored],
        "logprobs": [row.tolist() for row in logprobs],
    }


def fails() -> None:
    raise BadInput("the judge is away")


def fails_unsent() -> None:
    raise ValueError(Lock())  # cannot be pickled


def error_of(function: object, *arguments: object) -> str:
    try:
        function(*arguments)  # type: ignore[operator]
    except RondoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    end_with_agent()
    world.join()
    rank = world.rank()
    sums = [torch.tensor([1.0 + rank]), torch.full((2, 2), 10.0 * rank)]
    world.add_up(sums)
    metrics = {"loss": 1.0, "kl": rank}
    results = {
        "size": world.size(),
        "shares": world.gather([list(world.share(5))]),
        "gathered": world.gather(range(rank, 2)),
        "any": [world.any_of(flag) for flag in (False, rank == 1)],
        "sums": [tensor.tolist() for tensor in sums],
        "callers": world.gather([world.in_main(lambda: ("main", rank, world.size()))]),
        "errors": world.gather([error_of(world.in_main, fails)]),
        "unsent": world.gather([error_of(world.in_main, fails_unsent)]),
        "equal": error_of(world.check_equal, "update 1", {"loss": 1.0}),
        "unequal": world.gather([error_of(world.check_equal, "update 1", metrics)]),
        # also alone in the main process, which would wait for the others if it shared the work
        "alone": world.in_main(scores_and_samples),
        "together": scores_and_samples(),
    }
    if world.is_main():
        json.dump(results, sys.stdout)


main()
