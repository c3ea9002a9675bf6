"""The trainer against PPO-RLHF written plainly: one episode, one token at a time, in float64, on
transformers' own outputs.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.packing import unwrap_peft
from stages.lib.lm.saving import trainable_named
from stages.ppo.trainer.roles import Roles, ValueHead
from stages.ppo.trainer.update import PpoTrainer

PARAMS = PpoParams(
    batch_size=8, mini_batch_size=8, micro_batch_size=4, response_length=16, kl_coef=0.3, gamma=0.9, lam=0.8, cliprange=0.05,
    cliprange_value=0.05, vf_coef=0.5, entropy_coef=0.1, score_clip=1.5, missing_eos_penalty=0.7, length_penalty=0.01, free_length=3,
    temperature=0.8, max_grad_norm=1e9,
)  # fmt: skip
MEAN, STD = 0.3, 1.7
KINDS = {
    "adapters": {"lora": LoraParams(r=4, top_layers=1)},
    "adapters on shared layers": {"lora": LoraParams(r=4, top_layers=1), "related": True},
    "all weights": {"lora": LoraParams(r=0)},
    "value head": {"lora": LoraParams(r=4, top_layers=1), "value_head": True},
}


@pytest.fixture(params=KINDS)
def trainer(request, make_roles, shift) -> PpoTrainer:
    """After weights have moved, so that policy and reference, critic and reward model differ."""
    roles = make_roles(**KINDS[request.param], mean=MEAN, std=STD)
    for model in (roles.policy, roles.critic):
        shift(model, 0.02)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    prompts = [({"id": str(i), "prompt": ""}, [5 + i, 6, 7][: 1 + i % 3]) for i in range(8)]
    return PpoTrainer(roles, prompts, PARAMS, seed=0)


class Plain:
    """The four roles in float64, read from transformers' logits and hidden states."""

    def __init__(self, roles: Roles) -> None:
        self.policy, self.critic = (
            copy.deepcopy(roles.policy).double(),
            copy.deepcopy(roles.critic).double(),
        )
        with (
            roles.policy_trunk.reference() as reference,
            roles.reward_trunk.reference() as reward_model,
        ):
            self.reference, self.reward_model = (
                copy.deepcopy(model).double() for model in (reference, reward_model)
            )

    def logprobs(self, prompt, response, model=None):
        logits = (model or self.policy)(input_ids=torch.tensor([prompt + response])).logits[
            0
        ] / PARAMS.temperature
        rows = [logits[len(prompt) - 1 + t].log_softmax(-1) for t in range(len(response))]
        return torch.stack([row[token] for row, token in zip(rows, response, strict=True)]), [
            -(row.exp() * row).sum() for row in rows
        ]

    def ref_logprobs(self, prompt, response):
        with torch.no_grad(), off(self.reference):
            return self.logprobs(prompt, response, self.reference)[0]

    def states(self, model, prompt, response):
        return (
            unwrap_peft(model)
            .model(input_ids=torch.tensor([prompt + response]))
            .last_hidden_state[0]
        )

    def values(self, prompt, response):
        if isinstance(self.critic, ValueHead):
            return (
                self.states(self.policy, prompt, response)[len(prompt) - 1 : -1]
                @ self.critic.weight[0]
            )
        scores = (
            unwrap_peft(self.critic).score(self.states(self.critic, prompt, response)).squeeze(-1)
        )
        return (scores[len(prompt) - 1 : -1] - MEAN) / STD

    def score(self, prompt, response):
        """The reward model reads every response up to EOS, where a policy that was cut off has not
        written it.
        """
        read = response if response[-1] == 2 else [*response, 2]
        with torch.no_grad(), off(self.reward_model):
            raw = (
                unwrap_peft(self.reward_model)
                .score(self.states(self.reward_model, prompt, read)[-1])
                .item()
            )
        clipped = max(-PARAMS.score_clip, min(PARAMS.score_clip, (raw - MEAN) / STD))
        return (
            clipped
            - (0 if response[-1] == 2 else PARAMS.missing_eos_penalty)
            - 0.01 * max(len(response) - 3, 0)
        )


def off(model):
    return model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()


def advantages_of(rewards: list[float], values: list[float]) -> list[float]:
    """Schulman et al. 2016, eq. 16, as the sum that it is."""
    deltas = [
        r + PARAMS.gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
        for t, r in enumerate(rewards)
    ]
    decay = PARAMS.gamma * PARAMS.lam
    return [sum(decay**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def flat(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return rows[mask].double()


def test_rewards_advantages_losses_and_gradients(trainer, shift, request):
    roles, p = trainer.roles, PARAMS
    assert roles.common == (1 if "shared" in request.node.callspec.id else 0)
    rollout = trainer.rollout(trainer.sample_prompts())
    episodes = list(zip(rollout.prompts, rollout.responses, strict=True))
    assert {response[-1] == 2 for _, response in episodes} == {
        True,
        False,
    }  # both kinds of ending count

    # what the rollout saw
    plain = Plain(roles)
    with torch.no_grad():
        old = [plain.logprobs(*episode)[0] for episode in episodes]
        reference = [plain.ref_logprobs(*episode) for episode in episodes]
        values = [plain.values(*episode) for episode in episodes]
    scores = [plain.score(*episode) for episode in episodes]
    advantages = []
    for mine, theirs, value, score in zip(old, reference, values, scores, strict=True):
        rewards = [-p.kl_coef * float(a - b) for a, b in zip(mine, theirs, strict=True)]
        rewards[-1] += score
        advantages.append(torch.tensor(advantages_of(rewards, value.tolist()), dtype=torch.float64))
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    every = torch.cat(advantages)
    white = [(a - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt() for a in advantages]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(
        rollout.scores.double(), torch.tensor(scores, dtype=torch.float64), **close
    )
    for ours, expected in (
        (rollout.logprobs, old), (rollout.ref_logprobs, reference), (rollout.values, values), (rollout.returns, returns),
        (rollout.advantages, white),
    ):  # fmt: skip
        torch.testing.assert_close(flat(ours, rollout.mask), torch.cat(expected), **close)

    # one optimiser step, from weights that have moved since
    for model in (roles.policy, roles.critic):
        shift(model, 0.05)
    plain = Plain(roles)
    policy_loss, value_loss, clipped, tokens = 0.0, 0.0, 0, len(every)
    for episode, was, value, ret, advantage in zip(
        episodes, old, values, returns, white, strict=True
    ):
        now, entropies = plain.logprobs(*episode)
        estimates = plain.values(*episode)
        for t in range(len(was)):
            ratio = (now[t] - was[t]).exp()
            kept = min(max(float(ratio), 1 - p.cliprange), 1 + p.cliprange)
            if kept * advantage[t] < float(ratio) * advantage[t]:
                clipped += 1
                policy_loss = policy_loss - kept * advantage[t] / tokens
            else:
                policy_loss = policy_loss - ratio * advantage[t] / tokens
            policy_loss = policy_loss - p.entropy_coef * entropies[t] / tokens
            near = value[t] + (estimates[t] - value[t]).clamp(-p.cliprange_value, p.cliprange_value)
            value_loss = (
                value_loss
                + 0.5 * torch.maximum((estimates[t] - ret[t]) ** 2, (near - ret[t]) ** 2) / tokens
            )
    (policy_loss + p.vf_coef * value_loss).backward()
    gradients = {}
    for learner in trainer.learners:
        learner.step = lambda: None
    told = trainer.optimiser_step(rollout, list(range(8)), None)
    bonus = (
        p.entropy_coef
        * sum(float(e) for episode in episodes for e in plain.logprobs(*episode)[1])
        / tokens
    )
    assert told["policy_loss"] == pytest.approx(float(policy_loss.detach()) + bonus, abs=1e-4)
    assert told["value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
    assert told["clip_fraction"] == pytest.approx(clipped / tokens) and 0 < clipped < tokens
    for model, twin in ((roles.policy, plain.policy), (roles.critic, plain.critic)):
        expected = dict(trainable_named(twin))
        gradients = {name: parameter.grad for name, parameter in trainable_named(model)}
        assert gradients.keys() == expected.keys() and any(
            float(g.abs().max()) > 1e-3 for g in gradients.values()
        )
        for name, gradient in gradients.items():
            true = expected[name].grad
            rounding = 5e-4 * float(true.abs().max())  # of float32, where many terms cancel
            torch.testing.assert_close(
                gradient.double(),
                true,
                rtol=1e-3,
                atol=rounding,
                msg=lambda text, n=name: f"{n}: {text}",
            )
