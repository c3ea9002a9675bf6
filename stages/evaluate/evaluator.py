"""Responses of a model to the frozen prompts, with the scores of judges and reward model."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stages.lib.core.champion import anchor_path
from stages.lib.core.files import is_placeholder, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.progress import tracked
from stages.lib.core.rows import Demonstration, PromptRow, read_rows
from stages.lib.data.lengths import tokenize_fitting
from stages.lib.lm.loading import (
    load_causal_lm,
    load_policy,
    load_tokenizer,
)
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.responses import ScoredResponse, responder
from stages.lib.lm.scoring import RewardScorer


@dataclass(frozen=True)
class Sample(ScoredResponse):
    """A response, with its KL from SFT and from the first round's SFT."""

    kl_anchor: float  # nats per sequence


OneSamplePerPrompt = list[Sample]  # in the order of the prompts


class Evaluator:
    """The frozen prompts, the SFT model that KL is measured from, and this round's reward model, if
    there is one.

    `sample` and `sample_all` evaluate one model.
    """

    def __init__(self, params: Params, round_: str) -> None:
        self.params, data = params, stage_dir(round_, "prepare") / "data"
        self.rows = read_rows(PromptRow, data / "eval_prompts.jsonl")
        self.sft_path = stage_dir(round_, "sft") / "model"
        self.reward_path = stage_dir(round_, "reward") / "model"
        self.policy_path = stage_dir(round_, "ppo") / "policy"
        self.tokenizer = load_tokenizer(self.sft_path)
        self.prompts = [row["prompt"] for row in self.rows]
        self.respond = responder(params, self.tokenizer)
        people = read_rows(Demonstration, data / "sft_eval.jsonl")
        human = tokenize_fitting(self.tokenizer, people, ["completion"], params, "sft")
        self.people = human.rows
        self.human = human.prompts, human.responses["completion"]
        self.sft = load_causal_lm(self.sft_path, params.model)
        anchor = anchor_path(round_)
        same = anchor == self.sft_path
        self.anchor = self.sft if same else load_causal_lm(anchor, params.model)
        no_reward_model = is_placeholder(self.reward_path)
        self.scorer = None if no_reward_model else RewardScorer(self.reward_path, params)

    def load_ppo(self) -> Any:
        """This round's policy, on its SFT model."""
        return load_policy(self.sft_path, self.policy_path, self.params.model)

    def sample_all(self, model: Any, samples: int) -> list[OneSamplePerPrompt]:
        numbers = tracked("sampled", range(samples), samples, "passes")
        return [self.sample(model, number) for number in numbers]

    def sample(self, model: Any, number: int) -> OneSamplePerPrompt:
        """The `number`-th sample of each prompt, scored.

        Each number has its own random stream, so that it can be repeated alone
        (stages/evaluate/reproduce.py).
        """
        responses = self.respond(model, self.prompts, self.params.seed * 1000 + number)
        policy = None if model is self.sft else model
        scored = self.respond.scored(
            self.prompts, responses, policy, lambda: nullcontext(self.sft), self.scorer
        )
        from_anchor = scored
        if self.anchor is not self.sft:
            from_anchor = self.respond.scored(
                self.prompts, responses, model, lambda: nullcontext(self.anchor)
            )
        return [
            Sample(**vars(sample), kl_anchor=other.kl)
            for sample, other in zip(scored, from_anchor, strict=True)
        ]

    def perplexity(self, model: Any) -> float:
        """exp of the mean loss (nats per token) on the held-out human completions (one or more)."""
        logprobs = token_logprobs(model, *self.human)
        return math.exp(-float(torch.cat(logprobs).mean()))
