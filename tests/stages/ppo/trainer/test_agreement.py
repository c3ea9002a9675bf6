"""The trainer against PPO-RLHF written plainly: one episode, one token at a time, in float64, on
transformers' own outputs.
"""

import copy
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.core.types import TokenIds
from stages.lib.lm.packing import unwrap_peft
from stages.lib.lm.saving import trainable_named
from stages.ppo.trainer.roles import Roles, ValueHead
from stages.ppo.trainer.rollout import Rollout
from stages.ppo.trainer.update import PpoTrainer, draw_mini_batches

PARAMS = PpoParams(
    batch_size=8,
    mini_batch_size=8,
    micro_batch_size=4,
    response_length=16,
    kl_coef=0.3,
    gamma=0.9,
    lam=0.8,
    cliprange=0.05,
    cliprange_value=0.05,
    vf_coef=0.5,
    entropy_coef=0.1,
    score_clip=1.5,
    missing_eos_penalty=0.7,
    length_penalty=0.01,
    free_length=3,
    temperature=0.8,
    max_grad_norm=1e9,
)
MEAN, STD = 0.3, 1.7
EOS = 2
KINDS = {
    "adapters": {"lora": LoraParams(r=4, top_layers=1)},
    "adapters on shared layers": {"lora": LoraParams(r=4, top_layers=1), "related": True},
    "all weights": {"lora": LoraParams(r=0)},
    "gradient checkpointing": {
        "lora": LoraParams(r=4, top_layers=1),
        "gradient_checkpointing": True,
    },
    "all weights, gradient checkpointing": {
        "lora": LoraParams(r=0),
        "gradient_checkpointing": True,
    },
    "value head": {"lora": LoraParams(r=4, top_layers=1), "value_head": True},
}
Episodes = list[tuple[TokenIds, TokenIds]]  # prompts and responses


@pytest.fixture(params=KINDS)
def trainer(request, make_roles, shift) -> PpoTrainer:
    """After weights have changed, so that policy and reference, critic and reward model differ."""
    roles = make_roles(**KINDS[request.param], mean=MEAN, std=STD)
    assert roles.num_shared_layers == (1 if "shared" in request.param else 0)
    for model in (roles.policy, roles.critic):
        shift(model, 0.02)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    prompts = [({"id": str(i), "prompt": ""}, [5 + i, 6, 7][: 1 + i % 3]) for i in range(8)]
    return PpoTrainer(roles, prompts, PARAMS, seed=0)


class PlainRoles:
    """The four roles in float64, read from transformers' logits and hidden states."""

    def __init__(self, roles: Roles) -> None:
        self.policy = copy.deepcopy(roles.policy).double()
        self.critic = copy.deepcopy(roles.critic).double()
        with roles.policy_view.reference() as reference:
            self.reference = copy.deepcopy(reference).double()
        with roles.reward_view.reference() as reward_model:
            self.reward_model = copy.deepcopy(reward_model).double()

    def distributions(self, prompt, response, model=None):
        """Log-probabilities of the whole vocabulary, for each response token."""
        output = (model or self.policy)(input_ids=torch.tensor([prompt + response]))
        logits = output.logits[0] / PARAMS.temperature
        return [logits[len(prompt) - 1 + t].log_softmax(-1) for t in range(len(response))]

    def kl(self, prompt, response):
        """Exact KL of policy and reference, at each response token."""
        with torch.no_grad():
            policy_rows = self.distributions(prompt, response)
            with adapter_off(self.reference):
                ref_rows = self.distributions(prompt, response, self.reference)
        return torch.stack(
            [(p.exp() * (p - q)).sum() for p, q in zip(policy_rows, ref_rows, strict=True)]
        )

    def logprobs(self, prompt, response, model=None):
        """Log-probability and entropy of each response token."""
        rows = self.distributions(prompt, response, model)
        logprobs = torch.stack([row[token] for row, token in zip(rows, response, strict=True)])
        return logprobs, [-(row.exp() * row).sum() for row in rows]

    def ref_logprobs(self, prompt, response):
        with torch.no_grad(), adapter_off(self.reference):
            return self.logprobs(prompt, response, self.reference)[0]

    def states(self, model, prompt, response):
        trunk = unwrap_peft(model).model
        return trunk(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]

    def values(self, prompt, response):
        """The critic's estimate before each response token."""
        if isinstance(self.critic, ValueHead):
            states = self.states(self.policy, prompt, response)[len(prompt) - 1 : -1]
            return states @ self.critic.weight[0]
        states = self.states(self.critic, prompt, response)
        scores = unwrap_peft(self.critic).score(states).squeeze(-1)
        return (scores[len(prompt) - 1 : -1] - MEAN) / STD

    def score(self, prompt, response):
        """The reward model reads every response up to EOS, which is appended if it was cut off."""
        closed = response if response[-1] == EOS else [*response, EOS]
        with torch.no_grad(), adapter_off(self.reward_model):
            state = self.states(self.reward_model, prompt, closed)[-1]
            raw = unwrap_peft(self.reward_model).score(state).item()
        clipped = max(-PARAMS.score_clip, min(PARAMS.score_clip, (raw - MEAN) / STD))
        missing_eos_penalty = 0 if response[-1] == EOS else PARAMS.missing_eos_penalty
        return clipped - missing_eos_penalty - 0.01 * max(len(response) - 3, 0)


def adapter_off(model):
    return model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()


class PlainRollout(NamedTuple):
    """Per episode: a score, and one number per response token; advantages are whitened."""

    scores: list[float]
    logprobs: list[Tensor]
    ref_logprobs: list[Tensor]
    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]


def plain_rollout(roles: PlainRoles, episodes: Episodes) -> PlainRollout:
    with torch.no_grad():
        logprobs = [roles.logprobs(*episode)[0] for episode in episodes]
        ref_logprobs = [roles.ref_logprobs(*episode) for episode in episodes]
        values = [roles.values(*episode) for episode in episodes]
    scores = [roles.score(*episode) for episode in episodes]
    advantages, returns = [], []
    for policy_row, ref_row, value_row, score in zip(
        logprobs, ref_logprobs, values, scores, strict=True
    ):
        rewards = [-PARAMS.kl_coef * float(p - q) for p, q in zip(policy_row, ref_row, strict=True)]
        rewards[-1] += score
        advantages.append(
            torch.tensor(plain_advantages(rewards, value_row.tolist()), dtype=torch.float64)
        )
        sums = [
            sum(PARAMS.gamma**k * reward for k, reward in enumerate(rewards[t:]))
            for t in range(len(rewards))
        ]
        returns.append(torch.tensor(sums, dtype=torch.float64))
    tokens = torch.cat(advantages)
    scale = (tokens.var(unbiased=False) + 1e-8).sqrt()
    whitened = [(a - tokens.mean()) / scale for a in advantages]
    return PlainRollout(scores, logprobs, ref_logprobs, values, whitened, returns)


def plain_advantages(rewards: list[float], values: list[float]) -> list[float]:
    """Schulman et al. 2016, eq. 16, as the sum that it is."""
    deltas = [
        r + PARAMS.gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
        for t, r in enumerate(rewards)
    ]
    decay = PARAMS.gamma * PARAMS.lam
    return [sum(decay**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


class PlainLosses(NamedTuple):
    """Means over all tokens. policy: without the entropy bonus. clipped: number of tokens."""

    policy: Tensor
    entropy_bonus: Tensor
    value: Tensor
    clipped: int


def plain_losses(roles: PlainRoles, episodes: Episodes, old: PlainRollout) -> PlainLosses:
    policy_loss, entropy_bonus, value_loss, clipped = 0.0, 0.0, 0.0, 0
    tokens = sum(len(row) for row in old.logprobs)
    for episode, old_logprobs, old_values, returns, advantages in zip(
        episodes, old.logprobs, old.values, old.returns, old.advantages, strict=True
    ):
        logprobs, entropies = roles.logprobs(*episode)
        values = roles.values(*episode)
        for t, advantage in enumerate(advantages):
            ratio = (logprobs[t] - old_logprobs[t]).exp()
            clipped_ratio = min(max(float(ratio), 1 - PARAMS.cliprange), 1 + PARAMS.cliprange)
            if clipped_ratio * advantage < float(ratio) * advantage:
                clipped += 1
                policy_loss = policy_loss - clipped_ratio * advantage / tokens
            else:
                policy_loss = policy_loss - ratio * advantage / tokens
            entropy_bonus = entropy_bonus + PARAMS.entropy_coef * entropies[t] / tokens
            change = (values[t] - old_values[t]).clamp(
                -PARAMS.cliprange_value, PARAMS.cliprange_value
            )
            clipped_value = old_values[t] + change
            errors = (values[t] - returns[t]) ** 2, (clipped_value - returns[t]) ** 2
            value_loss = value_loss + 0.5 * torch.maximum(*errors) / tokens
    return PlainLosses(policy_loss, entropy_bonus, value_loss, clipped)


def sample_episodes(trainer: PpoTrainer) -> tuple[Rollout, Episodes]:
    rollout = trainer.rollout(trainer.sample_prompts())
    episodes = [(response.prompt_ids, response.tokens) for response in rollout.responses]
    assert {response[-1] == EOS for _, response in episodes} == {True, False}  # both endings count
    return rollout, episodes


def test_scores_logprobs_values_and_advantages_of_a_rollout(trainer):
    rollout, episodes = sample_episodes(trainer)
    plain_roles = PlainRoles(trainer.roles)
    expected = plain_rollout(plain_roles, episodes)
    close = {"rtol": 1e-4, "atol": 1e-4}
    kl = torch.cat([plain_roles.kl(*episode) for episode in episodes])
    assert kl.mean() > 0.01
    torch.testing.assert_close(rollout.kl[rollout.mask].double(), kl, **close)
    torch.testing.assert_close(
        rollout.scores.double(), torch.tensor(expected.scores, dtype=torch.float64), **close
    )
    for name in ("logprobs", "ref_logprobs", "values", "returns", "advantages"):
        numbers = getattr(rollout, name)[rollout.mask].double()
        torch.testing.assert_close(numbers, torch.cat(getattr(expected, name)), **close)


def test_losses_and_gradients_of_an_optimizer_step(trainer, shift):
    """From weights that have changed since the rollout, so that ratios differ from 1."""
    roles = trainer.roles
    rollout, episodes = sample_episodes(trainer)
    old = plain_rollout(PlainRoles(roles), episodes)
    for model in (roles.policy, roles.critic):
        shift(model, 0.05)
    plain_roles = PlainRoles(roles)
    expected = plain_losses(plain_roles, episodes, old)
    backward(plain_roles, expected)
    for optimizer in trainer.optimizers.values():
        optimizer.step = lambda: None
    metrics = trainer.optimizer_step(rollout, list(range(8)))

    tokens = int(rollout.mask.sum())
    assert metrics["policy_loss"] == pytest.approx(float(expected.policy.detach()), abs=1e-4)
    assert metrics["value_loss"] == pytest.approx(float(expected.value.detach()), rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(expected.clipped / tokens)
    assert 0 < expected.clipped < tokens
    for model, plain_model in (
        (roles.policy, plain_roles.policy),
        (roles.critic, plain_roles.critic),
    ):
        expected_parameters = dict(trainable_named(plain_model))
        gradients = {name: parameter.grad for name, parameter in trainable_named(model)}
        assert gradients.keys() == expected_parameters.keys()
        assert any(float(gradient.abs().max()) > 1e-3 for gradient in gradients.values())
        for name, gradient in gradients.items():
            expected_gradient = expected_parameters[name].grad
            # the rounding of float32, in which many terms cancel
            atol = 5e-4 * float(expected_gradient.abs().max())
            torch.testing.assert_close(
                gradient.double(),
                expected_gradient,
                rtol=1e-3,
                atol=atol,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def backward(roles: PlainRoles, losses: PlainLosses) -> None:
    """The value loss of a critic with an optimizer of its own has no weight."""
    weight = PARAMS.vf_coef if isinstance(roles.critic, ValueHead) else 1.0
    (losses.policy - losses.entropy_bonus + weight * losses.value).backward()


def plain_update(
    roles: PlainRoles, episodes: Episodes, old: PlainRollout, batches: list[list[int]], rate: float
) -> list[PlainLosses]:
    """A step of AdamW per mini-batch; gradients of policy and critic are clipped to 0.5 each."""
    optimizers = [
        torch.optim.AdamW([p for _, p in trainable_named(model)], rate, eps=eps, weight_decay=0.0)
        for model, eps in ((roles.policy, 1e-5), (roles.critic, 1e-8))
    ]
    steps = []
    for batch in batches:
        part = PlainRollout(*([column[i] for i in batch] for column in old))
        losses = plain_losses(roles, [episodes[i] for i in batch], part)
        backward(roles, losses)
        for optimizer in optimizers:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            optimizer.zero_grad()
        steps.append(losses)
    return steps


@pytest.mark.parametrize("trainer", ["adapters", "value head"], indirect=True)
def test_an_update_of_two_epochs_with_two_mini_batches_each(trainer):
    """Weights and metrics after four optimizer steps, on mini-batches in a new order per epoch."""
    rate = 0.01
    changes = {"mini_batch_size": 4, "num_ppo_epochs": 2, "max_grad_norm": 0.5}
    changes |= {"learning_rate": rate, "critic_learning_rate": rate}
    params = PARAMS.model_copy(update=changes)
    trainer = PpoTrainer(trainer.roles, trainer.prompts, params, seed=0)
    rollout, episodes = sample_episodes(trainer)
    plain_roles = PlainRoles(trainer.roles)
    old = plain_rollout(plain_roles, episodes)
    start = [p.clone() for _, p in trainable_named(plain_roles.policy)]
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    epochs = [draw_mini_batches(8, 4, generator) for _ in range(2)]
    assert epochs[0] != epochs[1]
    batches = [*epochs[0], *epochs[1]]
    steps = plain_update(plain_roles, episodes, old, batches, rate)
    metrics = trainer.optimize(rollout)

    tokens = [sum(len(old.logprobs[i]) for i in batch) for batch in batches]
    expected = {
        "policy_loss": [float(step.policy.detach()) for step in steps],
        "value_loss": [float(step.value.detach()) for step in steps],
        "clip_fraction": [step.clipped / n for step, n in zip(steps, tokens, strict=True)],
    }
    for name, values in expected.items():
        assert metrics[name] == pytest.approx(sum(values) / 4, rel=1e-2, abs=1e-3), name
    assert steps[0].clipped == 0 < steps[-1].clipped
    for model, plain_model in (
        (trainer.roles.policy, plain_roles.policy),
        (trainer.roles.critic, plain_roles.critic),
    ):
        plain_weights = dict(trainable_named(plain_model))
        for name, weight in trainable_named(model):
            # AdamW moves a weight by about the rate, also where its gradient is mostly rounding
            torch.testing.assert_close(
                weight.detach().double(), plain_weights[name].detach(), rtol=0, atol=0.1 * rate
            )
    moves = [
        (p.detach() - before).abs().max()
        for (_, p), before in zip(trainable_named(plain_roles.policy), start, strict=True)
    ]
    assert max(moves) > 2 * rate
