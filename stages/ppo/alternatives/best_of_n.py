"""Best-of-n distillation (RAFT, Dong et al. 2023; best-of-n as in Gao et al. 2023): SFT on the best
rewarded of n responses per prompt.
"""

from typing import Any, NamedTuple

import torch

from stages.lib.core.rows import RolloutRow
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.lm.lora import add_adapters
from stages.lib.training.trl_setup import completion_trainer
from stages.ppo.alternatives.callback import PolicyCallback, offline_arguments
from stages.ppo.alternatives.stage import TrainedPolicy, TrainingContext

LOGGED = {name: name for name in ("loss", "grad_norm", "learning_rate")}


class BestOfN(NamedTuple):
    """The best rewarded response to each prompt, and the rollout rows of all n per prompt."""

    prompts: list[TokenIds]
    responses: list[TokenIds]
    rows: list[RolloutRow]


class BestOfNCallback(PolicyCallback):
    """A PolicyCallback whose resume state has the chosen responses."""

    prompts: list[TokenIds]
    responses: list[TokenIds]

    def begin(self, policy: Any) -> None:
        super().begin(policy)
        if self.saved:
            self.prompts, self.responses = self.saved["prompts"], self.saved["responses"]
        else:
            self.prompts, self.responses, rows = choose(self.trained_policy, self.context)
            self.rollouts.append(rows)

    def state(self) -> StateDict:
        return super().state() | {"prompts": self.prompts, "responses": self.responses}


def train(context: TrainingContext) -> PolicyCallback:
    params = context.params
    model = add_adapters(context.sft, params.ppo.lora, "CAUSAL_LM")
    callback = BestOfNCallback(context, LOGGED)
    callback.begin(model)
    max_length = params.prepare.max_prompt_tokens + params.ppo.response_length
    arguments = offline_arguments(context, params.best_of_n, max_length)
    chosen = callback.prompts, callback.responses
    callback.train(completion_trainer(model, context.tokenizer, chosen, arguments, callback))
    return callback


def choose(policy: TrainedPolicy, context: TrainingContext) -> BestOfN:
    """Sample n responses per prompt from the untrained policy and keep the best rewarded ones.

    A prompt of which all rewards failed is left out. A response that did not end is trained on
    without EOS, as it was sampled.
    """
    n = context.params.best_of_n.n
    episodes = [episode for episode in context.prompts for _ in range(n)]
    generator = torch.Generator().manual_seed(context.params.seed)
    responses = policy.sample([tokens for _, tokens in episodes], context.params.ppo, generator)
    scored = policy.score(0, episodes, responses)
    rewards = {index: reward for index, reward in enumerate(scored.rewards) if reward is not None}
    groups = (
        [index for index in range(start, start + n) if index in rewards]
        for start in range(0, len(episodes), n)
    )
    best = [max(group, key=rewards.__getitem__) for group in groups if group]
    return BestOfN(
        [episodes[index][1] for index in best],
        [responses[index].tokens for index in best],
        scored.rows,
    )
