"""Responses of the policy and of SFT to training prompts, with the reward model's scores."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt
from stages.lib.judging.fluency import Fluency
from stages.lib.lm.loading import load_causal_lm, load_policy, load_tokenizer
from stages.lib.lm.lora import adapter_disabled, is_adapter
from stages.lib.lm.responses import Response, ScoredResponse, responder
from stages.lib.lm.scoring import RewardScorer


@dataclass(frozen=True)
class Candidate:
    """An answer of SFT. nll: nats per token under the reference."""

    text: str
    nll: float


CandidatesByPrompt = Mapping[str, Sequence[Candidate]]  # by str(prompt)


class Sampler:
    """The policy, its SFT model and the reward model; each call has its own random stream."""

    def __init__(self, params: Params, round_: str) -> None:
        sft = stage_dir(round_, "sft") / "model"
        self.tokenizer = load_tokenizer(sft)
        self.respond = responder(params, self.tokenizer)
        policy = stage_dir(round_, "ppo") / "policy"
        self.model = load_policy(sft, policy, params.model)
        self.sft_model = None if is_adapter(policy) else load_causal_lm(sft, params.model)
        self.scorer = RewardScorer(stage_dir(round_, "reward") / "model", self.tokenizer, params)

    def policy(self, prompts: Sequence[Prompt], seed: int) -> list[ScoredResponse]:
        """One scored response of the policy per prompt."""
        responses = self.policy_texts(prompts, seed)
        return self.respond.scored(responses, self.model, self.reference, self.scorer.model)

    def policy_texts(self, prompts: Sequence[Prompt], seed: int) -> list[Response]:
        """One response of the policy per prompt, not scored."""
        return self.respond(self.model, prompts, seed)

    def sft(self, prompts: Sequence[Prompt], seed: int) -> list[Response]:
        """One response of SFT per prompt."""
        with self.reference() as model:
            return self.respond(model, prompts, seed)

    def reference(self) -> AbstractContextManager[Any]:
        """A context with the SFT model: a model of its own, or the policy without its adapter."""
        return nullcontext(self.sft_model) if self.sft_model else adapter_disabled(self.model)


def sample_candidates(
    prompts: Sequence[Prompt], sampler: Sampler, params: Params
) -> CandidatesByPrompt:
    """replay.best_of responses of SFT per distinct prompt; those that do not end are dropped."""
    distinct = {str(prompt): prompt for prompt in prompts}.values()
    repeated = [prompt for prompt in distinct for _ in range(params.replay.best_of)]
    if not repeated:
        return {}
    responses = sampler.sft(repeated, params.seed + 1)
    with sampler.reference() as model:
        fluency = Fluency(model, sampler.tokenizer, params.prepare.prompt_format)
        nll = fluency(repeated, [response.text for response in responses])
    candidates: dict[str, list[Candidate]] = {}
    for prompt, response, value in zip(repeated, responses, nll, strict=True):
        if response.ended:
            candidates.setdefault(str(prompt), []).append(Candidate(response.text, value))
    return candidates
