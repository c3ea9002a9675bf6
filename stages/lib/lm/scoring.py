"""Scores of a reward model, and the KL of a policy to its reference.

From the inside out: scores from hidden states (`score_head`), scores of token sequences
(`reward_scores`), calibrated scores of texts with a saved reward model (`RewardScorer`).

Shapes: B responses, M tokens of all rows, H hidden size.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import is_placeholder
from stages.lib.core.model_folders import read_config
from stages.lib.core.params import Params
from stages.lib.core.params.shared import ModelParams, PromptFormat, Reduce
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import encode, end_of_response, read_whole_conversations
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.loading import check_vocabulary, load_any_tokenizer, load_reward_model
from stages.lib.lm.logprobs import compare_states
from stages.lib.lm.packing import Packed, forward_layers, hidden_states, pack, unwrap_peft
from stages.lib.lm.world import batches_by_tokens, in_step


def ensemble_members(reward_model: Any) -> list[Any]:
    """The reward model and the further members of its ensemble."""
    return [reward_model, *getattr(unwrap_peft(reward_model), "ensemble", [])]


def ensemble_scores(reward_model: Any, read: Callable[[Any], Tensor]) -> Tensor:
    """Raw scores of an ensemble, in the units of its first member.

    So an ensemble can be used like one reward model, with the calibration of the first member: its
    calibrated scores of SFT demonstrations have mean 0 and standard deviation 1
    (`config.ensemble_mean`, `config.ensemble_std`).

    Args:
        reward_model: the first member.
        read: returns one member's (B,) raw scores.

    Returns:
        (B,) scores: mean or minimum (`config.ensemble_reduce`) of the calibrated scores,
        standardised again, because a mean varies less than its terms and a minimum is lower, and
        converted back. Without further members, the raw scores of the one model.
    """
    first, *others = ensemble_members(reward_model)
    raw = read(first)
    if not others:
        return raw
    scores = torch.stack(
        [
            calibrate_scores(raw, first),
            *(calibrate_scores(read(member), member) for member in others),
        ]
    )
    config = first.config
    reduced = scores.amin(0) if config.ensemble_reduce == Reduce.min.value else scores.mean(0)
    standardised = (reduced - config.ensemble_mean) / config.ensemble_std
    return standardised * config.std + config.mean


def set_calibration(
    model: Any,
    scores: Tensor,
    problem: str = "the reward model has diverged",
    fix: str = "lower reward.learning_rate (metrics.jsonl has the loss of each step)",
) -> Any:
    """Store the mean and standard deviation of a reward model's scores in its config; returns it.

    Calibrated scores are in standard deviations from this mean.

    Args:
        model: the reward model.
        scores: (B,) raw scores of the demonstrations of `calibration_demonstrations`.
        problem: what it means that they are no scores, for the error.
        fix: the next step, likewise.

    Raises:
        RondoError: the scores are all equal, or not finite.
    """
    model.config.mean, model.config.std = float(scores.mean()), float(scores.std())
    # written so that nan fails
    if not 0 < model.config.std < math.inf:
        raise RondoError(
            f"{problem}: its scores of {len(scores)} held-out demonstrations have mean "
            f"{model.config.mean:.4g} and standard deviation {model.config.std:.4g}; {fix}"
        )
    return model


def is_calibrated(reward_model: Any) -> bool:
    config = reward_model.config
    return hasattr(config, "mean") and hasattr(config, "std")


def calibrate_scores(raw: Tensor, reward_model: Any) -> Tensor:
    """Raw scores in standard deviations above the mean score of SFT demonstrations.

    Raises:
        BadInput: the reward model has no calibration.
    """
    config = reward_model.config
    if not is_calibrated(reward_model):
        raise BadInput(
            f"{config.name_or_path}/config.json: no mean and std of its scores, which Rondo's "
            "reward stage writes: name a model of that stage, or add them"
        )
    return (raw - config.mean) / config.std


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


def load_reading_tokenizer(path: Path, prompt_format: PromptFormat) -> PreTrainedTokenizerBase:
    """The tokenizer of a reward model. One that others trained reads whole conversations; one that
    the reward stage wrote, which is calibrated, as that stage did.

    Raises:
        BadInput: it cannot be used.
    """
    tokenizer = load_any_tokenizer(path)
    of_stage = {"mean", "std"} <= read_config(path).keys()
    if prompt_format is PromptFormat.chat and tokenizer.chat_template and not of_stage:
        read_whole_conversations(tokenizer)
    return tokenizer


def reads_alike(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give a response the same tokens, and end it with the same ones."""
    same_end = end_of_response(one) == end_of_response(other)
    return bool(same_end and one.get_vocab() == other.get_vocab())


def reads_texts(reward_model: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a reward model reads other tokens than the policy's tokenizer has, so that it gets
    texts. A placeholder reads nothing.
    """
    return not (
        is_placeholder(reward_model) or reads_alike(load_any_tokenizer(reward_model), tokenizer)
    )


def load_reward_model_for(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    params: ModelParams,
    device: torch.device | None = None,
) -> PreTrainedModel | None:
    """The reward model of a round, for the tokens of a tokenizer; None if there is none, or if it
    has a tokenizer of its own and reads texts (`RewardScorer`).

    Raises:
        BadInput: it has fewer tokens than the tokenizer.
    """
    if is_placeholder(path) or reads_texts(path, tokenizer):
        return None
    check_vocabulary(path, tokenizer)
    return load_reward_model(path, params, device)


class RewardScorer:
    """Calibrated scores of whole responses (with EOS) by a saved reward model, which may have a
    tokenizer and a chat template of its own.

    Args:
        path: folder of the reward model and its tokenizer.
        params: all params, for the model's dtype and the prompt format.

    Raises:
        BadInput: there is no reward model, it is damaged, or has fewer tokens than its tokenizer.
    """

    def __init__(self, path: Path, params: Params) -> None:
        self.params = params
        self.tokenizer = load_reading_tokenizer(path, params.prepare.prompt_format)
        check_vocabulary(path, self.tokenizer)
        self.model = load_reward_model(path, params.model)

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """Calibrated score per response."""
        return self.tokens(self.encode(prompts, responses))

    def reads(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether it reads the tokens of another model's tokenizer."""
        return reads_alike(self.tokenizer, tokenizer)

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
