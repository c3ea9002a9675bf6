"""How the critic learns: its own eps, its epochs, and its warm-up, on the tiny Llama."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.saving import trainable_named
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.update import PpoTrainer

PROMPTS = [({"id": str(i), "prompt": str(i)}, [5 + i, 6]) for i in range(20)]
SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "response_length": 6,
    "critic_learning_rate": 1e-3,
}


@pytest.fixture
def make_trainer(make_roles):
    def make(**changes: object) -> PpoTrainer:
        roles = make_roles(lora=LoraParams(r=4))
        return PpoTrainer(roles, PROMPTS, PpoParams(**(SETTINGS | changes)), seed=0)

    return make


def weights(model: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for _, weight in trainable_named(model)]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_small_errors_move_the_critic_at_its_rate(make_trainer):
    """Gradients of about 1e-6: with the policy's eps a step would be a tenth of the rate."""
    trainer = make_trainer()
    rollout = trainer.rollout(trainer.sample_prompts())
    rollout = replace(rollout, returns=rollout.values + 1e-6 * rollout.mask)
    before = weights(trainer.roles.critic)
    metrics = trainer.optimizer_step(rollout, list(range(8)), None, ["critic"])
    assert metrics["critic_grad_norm"] < 1e-5
    moved = distance(before, weights(trainer.roles.critic))
    assert moved == pytest.approx(1e-3, rel=0.1)


def test_the_critic_has_epochs_of_its_own(make_trainer):
    """Two of the critic and one of the policy, which ends where it does with one of each."""
    after = {}
    for epochs in (None, 2):
        trainer = make_trainer(num_ppo_epochs=1, num_critic_epochs=epochs)
        steps: list[list[str]] = []
        step = trainer.optimizer_step
        trainer.optimizer_step = lambda *args, step=step, steps=steps: (
            steps.append(args[3]) or step(*args)
        )
        trainer.step()
        after[epochs] = weights(trainer.roles.policy), weights(trainer.roles.critic), steps
    both = ["policy", "critic"]
    assert after[None][2] == [both, both] and after[2][2] == [both, both, ["critic"], ["critic"]]
    assert distance(after[None][0], after[2][0]) == 0 < distance(after[None][1], after[2][1])


def test_the_warm_up_fits_the_critic_and_leaves_the_policy(make_trainer):
    trainer = make_trainer(critic_warmup_epochs=20, critic_learning_rate=1e-2, cliprange_value=1e-3)
    roles, batch = trainer.roles, PROMPTS * 2
    responses = roles.sample([tokens for _, tokens in batch], trainer.params, trainer.generator)

    def explained() -> float:
        rollout = trainer.rollout(batch, responses)
        assert rollout.responses == responses
        return F.explained_variance(rollout.values, rollout.returns, rollout.mask)

    policy, before = weights(roles.policy), explained()
    trainer.fit_critic(batch, responses)
    assert distance(policy, weights(roles.policy)) == 0
    assert explained() > max(before, 0) + 0.3
    assert trainer.updates == 0 and trainer.rollout_pass is None
    trainer.step()  # the check before the first update passes
