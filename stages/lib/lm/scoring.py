"""Scores of a reward model, and the KL of a policy to its reference.

From the inside out: scores from hidden states (`score_head`), scores of token sequences
(`reward_scores`), calibrated scores of texts with a saved reward model (`RewardScorer`), and
everything that evaluation and PPO need to know about sampled responses (`score_responses`).

Shapes: B responses, M tokens of all rows, H hidden size.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import encode
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.loading import check_vocabulary, load_reward_model
from stages.lib.lm.logprobs import Reference, compare_states, response_logprobs
from stages.lib.lm.packing import (
    Packed,
    batches_by_tokens,
    hidden_states,
    pack,
    unwrap_peft,
)
from stages.lib.lm.reward_ensemble import calibrate_scores, ensemble_members, ensemble_scores
from stages.lib.lm.sharding import in_step, is_sharded
from stages.lib.lm.shared_layers import forward_layers, num_shared_layers


def score_head(model: Any, hidden: Tensor) -> Tensor:
    """(...) scores from (..., H) last hidden states, in float32.

    In bfloat16, scores near 3 would differ by at least 0.016.
    """
    return torch.nn.functional.linear(
        hidden.float(), unwrap_peft(model).score.weight.float()
    ).squeeze(-1)


def last_scores(model: Any, packed: Packed, entering: Tensor | None, first: int) -> Tensor:
    """(B,) raw scores at the last token of each row.

    Args:
        model: a reward model, without ensemble.
        packed: the rows.
        entering: (M, H) states that enter layer `first`; None: start from the tokens.
        first: number of the first layer to run, if `entering` is given.
    """
    return score_head(model, forward_layers(model, packed, entering, first)[0][packed.last])


@torch.no_grad()
def member_scores(model: Any, sequences: Sequence[TokenIds]) -> Tensor:
    """(B,) raw scores of one reward model, float32 on the CPU.

    They are read at each sequence's last token, which should be EOS, as in training.
    """
    scores, device = torch.zeros(len(sequences)), unwrap_peft(model).device
    for batch in batches_by_tokens([len(s) for s in sequences], device, "reward scores"):
        packed = pack([sequences[i] for i in batch], [[] for _ in batch], device)
        states = hidden_states(model, packed)[packed.last]
        scores[torch.tensor(batch)] = score_head(model, states).cpu()
    world.add_up([scores])
    return scores


def reward_scores(model: Any, sequences: Sequence[TokenIds]) -> Tensor:
    """(B,) raw scores of a reward model or its ensemble; see `member_scores`."""
    return ensemble_scores(model, lambda member: member_scores(member, sequences))


class RewardScorer:
    """Calibrated scores of whole responses (with EOS) by a saved reward model.

    Args:
        path: folder of the reward model.
        tokenizer: its tokenizer.
        params: all params, for the model's dtype and the prompt format.

    Raises:
        BadInput: there is no reward model, it is damaged, or has fewer tokens than the tokenizer.
    """

    def __init__(self, path: Path, tokenizer: Any, params: Params) -> None:
        check_vocabulary(path, tokenizer)
        self.model = load_reward_model(path, params.model)
        self.tokenizer, self.params = tokenizer, params

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """Calibrated score per response."""
        return self.tokens(self.encode(prompts, responses))

    def encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[TokenIds]:
        """Tokens of prompt, response and EOS, per response."""
        encoded = (
            encode(self.tokenizer, p, r, self.params.prepare.prompt_format)
            for p, r in zip(prompts, responses, strict=True)
        )
        return [prompt + response for prompt, response in encoded]

    def tokens(self, sequences: Sequence[TokenIds]) -> list[float]:
        """Calibrated score per sequence of tokens."""
        scores: list[float] = calibrate_scores(self.raw(sequences), self.model).tolist()
        return scores

    def raw(self, sequences: Sequence[TokenIds]) -> Tensor:
        """(B,) scores before calibration."""
        return reward_scores(self.model, sequences)

    def scores_per_member(self, sequences: Sequence[TokenIds]) -> Tensor:
        """(K, B) calibrated scores of each of the K members of an ensemble."""
        scores = [
            calibrate_scores(member_scores(member, sequences), member)
            for member in ensemble_members(self.model)
        ]
        return torch.stack(scores)


class ResponseScores(NamedTuple):
    """Scores of B responses, each a (B,) float32 tensor on the CPU.

    kl: KL of the policy to the reference, nats per sequence: the sum over the response's tokens of
    the exact KL of the two distributions that the token was sampled from. Its mean is an unbiased
    estimate of the KL of sequences, with less variance than that of log-ratios, and is never
    negative. ref_logprobs: log-probability under the reference, nats per sequence. scores: raw
    scores of the reward model.
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
    ends: EndTokens,
    temperature: float,
) -> ResponseScores:
    """Score sampled responses: KL to the reference, and the reward model's score.

    The layers that policy, reference and reward model share run once per batch.

    Args:
        policy: the model that sampled the responses; None: no KL.
        reference: opens a context with the reference model.
        prompt_ids: tokens of each prompt.
        response_ids: tokens of each response, at least one, as `generate` returns them.
        reward_model: a reward model or its ensemble; None: no scores.
        ends: the tokens that end a response; the reward model reads the canonical one.
        temperature: divides the logits of policy and reference, as in sampling.

    Returns:
        The scores. `kl` is 0 without a policy, and `scores` are 0 without a reward model.

    Raises:
        ValueError: the numbers of prompts and responses differ.

    Example:
        scores = score_responses(
            policy,
            lambda: adapter_disabled(policy),
            prompt_ids,
            response_ids,
            reward_model=reward_model,
            ends=end_tokens(policy, tokenizer),
            temperature=1.0,
        )
        mean_kl = scores.kl.mean().item()  # nats per sequence
    """
    results = ResponseScores(*(torch.zeros(len(prompt_ids)) for _ in ResponseScores._fields))
    with reference() as model:
        models = [
            model,
            *([policy] if policy else []),
            *(ensemble_members(reward_model) if reward_model else []),
        ]
        common = 0 if is_sharded(model) else num_shared_layers(*models)
        device = unwrap_peft(model).device
    lengths = [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    batches = batches_by_tokens(lengths, device, "scoring")
    for batch, is_own in in_step(model, batches, [0]):
        packed = pack(
            [prompt_ids[i] for i in batch], [response_ids[i] for i in batch], device, ends
        )
        # The reference runs all layers; the others start from the states that enter layer `common`.
        with reference() as model:
            ref_hidden, [entering] = forward_layers(model, packed, keep=[common])
            if policy is None:
                ref_logprobs = response_logprobs(model, packed, ref_hidden, temperature)
        start = entering if common else None
        if policy:
            hidden, _ = forward_layers(policy, packed, start, common)
            compared = compare_states(policy, reference, packed, hidden, ref_hidden, temperature)
            ref_logprobs = compared.ref_logprobs
        if reward_model:
            scores = ensemble_scores(
                reward_model, partial(last_scores, packed=packed, entering=start, first=common)
            )
        if not is_own:
            continue
        results.ref_logprobs[batch] = ref_logprobs.sum(1).cpu()
        if policy:
            results.kl[batch] = compared.kl.sum(1).cpu()
        if reward_model:
            results.scores[batch] = scores.cpu()
    world.add_up(results)
    return results


@torch.no_grad()
def rounding_differences(
    model: Any,
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    *,
    ends: EndTokens,
    temperature: float,
) -> tuple[float, list[Tensor]]:
    """How far a model is from itself if its numbers are rounded otherwise: it runs on its
    embeddings, and on embeddings that differ by at most half a unit in the last place.

    A policy whose weights moved by nothing that matters differs from its reference as much: in
    bfloat16, each logit between 16 and 32 is rounded to a multiple of 1/8.

    Returns:
        The mean KL, nats per token; and for each response the log-ratios of its tokens, in nats,
        float32 on the CPU.
    """
    kl, log_ratios = torch.zeros(()), [torch.zeros(len(ids)) for ids in response_ids]
    inner = unwrap_peft(model)
    lengths = [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    batches = batches_by_tokens(lengths, inner.device, "rounding")
    for batch, is_own in in_step(model, batches, [0]):
        responses = [response_ids[i] for i in batch]
        packed = pack([prompt_ids[i] for i in batch], responses, inner.device, ends)
        embedded = inner.get_input_embeddings()(packed.input_ids)
        # the same numbers for a batch, whichever process has it
        uniforms = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(batch[0]))
        relative = torch.finfo(embedded.dtype).eps * (uniforms.to(embedded.device) - 0.5)
        other = (embedded.double() * (1 + relative)).to(embedded.dtype)
        hidden, other_hidden = (hidden_states(model, packed, one) for one in (embedded, other))
        compared = compare_states(
            model, lambda: nullcontext(model), packed, other_hidden, hidden, temperature
        )
        if not is_own:
            continue
        kl += compared.kl.sum().cpu()
        rows = (compared.logprobs - compared.ref_logprobs).cpu()
        for i, row, response in zip(batch, rows, responses, strict=True):
            log_ratios[i] = row[: len(response)].float()
    world.add_up([kl, *log_ratios])
    return float(kl) / sum(map(len, response_ids)), log_ratios
