"""A saved reward model that scores prompts with responses."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import encode
from stages.lib.lm.loading import load_reward_model
from stages.lib.lm.logprobs import response_logprobs
from stages.lib.lm.packing import Packed, _by_length, hidden_states, pack, unwrap_peft
from stages.lib.lm.reward_ensemble import calibrate_scores, ensemble_members, ensemble_scores
from stages.lib.lm.shared_layers import forward_layers, num_shared_layers

Reference = Callable[
    [], AbstractContextManager[Any]
]  # a context in which a model is what it was before PPO: an adapter is off


class RewardScorer:
    """Calibrated scores of whole responses (with EOS) under a reward model."""

    def __init__(self, path: Path, tokenizer: Any, params: Params, batch_size: int) -> None:
        self.model, self.tokenizer, self.params = (
            load_reward_model(path, params.model),
            tokenizer,
            params,
        )
        self.batch_size = batch_size

    def raw(self, sequences: Sequence[TokenIds]) -> Tensor:
        return reward_scores(self.model, sequences, batch_size=self.batch_size)

    def tokens(self, sequences: Sequence[TokenIds]) -> list[float]:
        scores: list[float] = calibrate_scores(self.raw(sequences), self.model).tolist()
        return scores

    def scores_per_member(self, sequences: Sequence[TokenIds]) -> Tensor:
        """(K, B) calibrated scores of each of K members of an ensemble."""
        each = (
            calibrate_scores(member_scores(m, sequences, batch_size=self.batch_size), m)
            for m in ensemble_members(self.model)
        )
        return torch.stack(list(each))

    def encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[TokenIds]:
        encoded = (
            encode(self.tokenizer, p, r, self.params.prepare.prompt_format)
            for p, r in zip(prompts, responses, strict=True)
        )
        return [prompt + response for prompt, response in encoded]

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        return self.tokens(self.encode(prompts, responses))


def score_head(model: Any, hidden: Tensor) -> Tensor:
    """(...) scores of (..., H) states, in float32: in bfloat16 a score near 3 moves in steps of
    0.016.
    """
    return torch.nn.functional.linear(
        hidden.float(), unwrap_peft(model).score.weight.float()
    ).squeeze(-1)


def last_scores(model: Any, packed: Packed, entering: Tensor | None, first: int) -> Tensor:
    """(B,) raw scores at the rows' last tokens, from the (M, H) states that enter layer `first`, or
    from the tokens.
    """
    return score_head(model, forward_layers(model, packed, entering, first)[0][packed.last])


class ResponseScores(NamedTuple):
    """Of B responses, float32 on the CPU. kl, ref_logprobs: (B,) nats a sequence; scores: (B,) raw,
    where there is a reward model.
    """

    kl: Tensor
    ref_logprobs: Tensor
    scores: Tensor


@torch.no_grad()
def score_responses(
    policy: Any | None,
    reference: Reference,
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    *,
    reward_model: Any = None,
    eos_token_id: int,
    temperature: float,
    batch_size: int,
) -> ResponseScores:
    """The log-ratio of policy to reference (0 where there is no policy), and what a reward model
    says, which reads responses up to EOS.

    Layers that these models have in common run once.
    """
    told = ResponseScores(*(torch.zeros(len(prompt_ids)) for _ in ResponseScores._fields))
    with reference() as model:
        together = [
            model,
            *([policy] if policy else []),
            *(ensemble_members(reward_model) if reward_model else []),
        ]
        common, device = num_shared_layers(*together), unwrap_peft(model).device
    for batch in _by_length(
        [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)], batch_size
    ):
        packed = pack(
            [prompt_ids[i] for i in batch], [response_ids[i] for i in batch], device, eos_token_id
        )
        with reference() as model:
            hidden, [entering] = forward_layers(model, packed, keep=[common])
            theirs = own = response_logprobs(model, packed, hidden, temperature)
        start = entering if common else None
        if policy:
            own = response_logprobs(
                policy, packed, forward_layers(policy, packed, start, common)[0], temperature
            )
        told.kl[batch], told.ref_logprobs[batch] = (own - theirs).sum(1).cpu(), theirs.sum(1).cpu()
        if reward_model:
            told.scores[batch] = ensemble_scores(
                reward_model, partial(last_scores, packed=packed, entering=start, first=common)
            ).cpu()
    return told


def reward_scores(model: Any, sequences: Sequence[TokenIds], *, batch_size: int = 64) -> Tensor:
    """(B,) raw scores of a reward model or its ensemble, as `member_scores` has them of one member."""
    return ensemble_scores(
        model, lambda member: member_scores(member, sequences, batch_size=batch_size)
    )


@torch.no_grad()
def member_scores(model: Any, sequences: Sequence[TokenIds], *, batch_size: int = 64) -> Tensor:
    """(B,) raw scores, float32 on the CPU, read at each sequence's last token (EOS, where it was
    trained with EOS).
    """
    scores = torch.empty(len(sequences))
    for batch in _by_length([len(s) for s in sequences], batch_size):
        packed = pack([sequences[i] for i in batch], [[] for _ in batch], unwrap_peft(model).device)
        scores[torch.tensor(batch)] = score_head(
            model, hidden_states(model, packed)[packed.last]
        ).cpu()
    return scores
