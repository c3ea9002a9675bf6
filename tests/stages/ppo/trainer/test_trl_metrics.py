"""The trainer's losses and diagnostics on the tiny Llama against those of the last TRL with a
PPOTrainer (`trl_1_12.py`): over which tokens they are means.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.ppo.trainer.rollout import describe
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.ppo.trainer import trl_1_12 as trl

PARAMS = PpoParams(
    batch_size=8,
    mini_batch_size=8,
    micro_batch_size=8,
    response_length=16,
    missing_eos_penalty=0.7,
    cliprange=0.05,
)


@pytest.fixture
def step(make_roles, shift):
    """A rollout, its logits, the log-probabilities of a policy that was changed since, and a
    function from the size of micro-batches to the metrics of an optimizer step.
    """
    prompts = [({"prompt": ""}, [5 + i, 6, 7][: 1 + i % 3]) for i in range(8)]
    trainer = PpoTrainer(make_roles(lora=LoraParams(r=4, top_layers=1)), prompts, PARAMS, seed=0)
    rollout = trainer.rollout(trainer.sample_prompts())

    packed = trainer.pack_episodes(rollout.responses, range(8))

    @torch.no_grad()
    def logits():
        hidden = trainer.roles.policy_hidden(packed, rollout.policy_states)
        return trainer.roles.policy.get_output_embeddings()(hidden[packed.predicts])

    sampled_logits = logits()
    shift(trainer.roles.policy, 0.3)
    shift(trainer.roles.critic, 0.3)
    for optimizer in trainer.optimizers.values():
        optimizer.optimizer.step = lambda: None

    def metrics(micro_batch_size):
        trainer.params = PARAMS.model_copy(update={"micro_batch_size": micro_batch_size})
        return trainer.optimizer_step(rollout, list(range(8)))

    new_logprobs = logits().log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
    return SimpleNamespace(
        rollout=rollout,
        logits=sampled_logits,
        new_logprobs=packed.to_rows(new_logprobs),
        metrics=metrics,
    )


def test_diagnostics_are_means_over_response_tokens(step):
    """TRL's approxkl and ratio are means over padding too, on which they are 0 and 1: the longer
    the longest response of the batch, the smaller the changes look. Here they are the same with
    padding (micro-batches of 8) and without (of 1).
    """
    rollout, pad = step.rollout, torch.nn.functional.pad
    log_ratios = (step.new_logprobs - rollout.logprobs)[rollout.mask].tolist()
    ratios = [math.exp(log_ratio) for log_ratio in log_ratios]
    tokens, positions = len(ratios), rollout.mask.numel()
    assert tokens < positions
    for size in (8, 1):
        metrics = step.metrics(size)
        assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / tokens, rel=1e-4)
        assert metrics["approx_kl"] == pytest.approx(
            sum(r - 1 - math.log(r) for r in ratios) / tokens, rel=1e-3
        )
    for columns in (0, 10):
        new, old, advantages = (
            pad(numbers, (0, columns))
            for numbers in (step.new_logprobs, rollout.logprobs, rollout.advantages)
        )
        _, _, approxkl, ratio = trl.policy_loss(
            new, old, advantages, ~pad(rollout.mask, (0, columns)), PARAMS.cliprange
        )
        padded = positions + columns * 8
        assert ratio.item() == pytest.approx((sum(ratios) + padded - tokens) / padded, rel=1e-4)
        assert approxkl.item() == pytest.approx(
            0.5 * sum(math.log(r) ** 2 for r in ratios) / padded, rel=1e-3
        )


def test_entropy_is_a_mean_over_response_tokens(step):
    """TRL's policy/entropy_avg includes the logits after the end of a response, here those of the
    uniform distribution, so the entropy looks higher.
    """
    rollout, vocabulary = step.rollout, step.logits.shape[1]
    entropies = scipy_entropy(step.logits.softmax(-1).numpy(), axis=1)
    assert describe(rollout, 1.0)["entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    for columns in (0, 10):
        mask = torch.nn.functional.pad(rollout.mask, (0, columns))
        logits = torch.zeros(*mask.shape, vocabulary).masked_scatter(mask[..., None], step.logits)
        outside = mask.numel() - len(entropies)
        expected = (entropies.sum() + outside * math.log(vocabulary)) / mask.numel()
        assert trl.entropy(logits).mean().item() == pytest.approx(expected, rel=1e-4)
        assert expected > entropies.mean() + 0.1


def test_a_loss_is_the_mean_over_the_mini_batchs_tokens(step):
    """TRL averages each micro-batch and then these means, so a token of a short response weighs
    more, and the size of micro-batches, chosen for memory, changes what is learnt.
    """
    rollout = step.rollout

    def trl_loss(rows):
        return trl.policy_loss(
            step.new_logprobs[rows],
            rollout.logprobs[rows],
            rollout.advantages[rows],
            ~rollout.mask[rows],
            PARAMS.cliprange,
        )[0].item()

    whole = trl_loss(torch.arange(8))
    mean_of_means = sum(trl_loss(rows) for rows in torch.arange(8).split(1)) / 8
    assert step.metrics(8)["policy_loss"] == pytest.approx(whole, abs=1e-5)
    assert step.metrics(1)["policy_loss"] == pytest.approx(whole, abs=1e-5)
    assert abs(mean_of_means - whole) > 0.01
