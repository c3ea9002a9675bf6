"""What the trainer hands to the functions of PPO, by hand on a rollout of the tiny Llama."""

from typing import Any

import pytest
import torch

from stages.lib.core.errors import RondoError
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.ppo.trainer.update import PpoTrainer

BATCH = 8
SETTINGS: dict[str, Any] = {
    "batch_size": BATCH,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "total_episodes": 4 * BATCH,
    "num_ppo_epochs": 1,
    "response_length": 6,
    "learning_rate": 1e-2,
    "missing_eos_penalty": 0.0,
    "score_clip": 1e9,
}
PROMPTS = [({"id": str(i), "prompt": str(i)}, [5 + i, 6]) for i in range(20)]


@pytest.fixture
def make_trainer(make_roles, shift):
    """`moved`: policy and critic are no longer what they started as."""

    def make(moved: float = 0.0, **changes: object) -> PpoTrainer:
        roles = make_roles(lora=LoraParams(r=4))
        for model in (roles.policy, roles.critic):
            shift(model, moved)
        return PpoTrainer(roles, PROMPTS, PpoParams(**(SETTINGS | changes)), seed=0)

    return make


def test_prompts_are_an_endless_pass_that_is_shuffled_anew(make_trainer):
    """Five batches of 8 are two passes over 20 prompts."""
    trainer = make_trainer()
    drawn = [row["id"] for _ in range(5) for row, _ in trainer.sample_prompts()]
    first, second = drawn[:20], drawn[20:]
    everything = [row["id"] for row, _ in PROMPTS]
    assert sorted(first) == sorted(second) == sorted(everything)
    assert first != second and everything not in (first, second)


def test_a_run_has_at_most_max_steps_updates(make_trainer):
    """32 episodes are 4 batches."""
    updates = [make_trainer(max_steps=steps).planned_updates for steps in (None, 3, 5)]
    assert updates == [4, 3, 4]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tokens_are_sampled_with_the_probabilities_that_are_trained_on(make_trainer, temperature):
    """A token is the one in whose part of the cumulative distribution the uniform number falls; its
    log-probability is that of this part, by transformers' logits.
    """
    trainer = make_trainer(moved=0.3, temperature=temperature)
    batch = trainer.sample_prompts()
    numbers = torch.Generator()
    numbers.set_state(trainer.generator.get_state())
    uniforms = torch.rand(BATCH, 6, generator=numbers).double()
    rollout = trainer.rollout(batch)
    for row, ((_, prompt), response) in enumerate(zip(batch, rollout.responses, strict=True)):
        with torch.no_grad():
            logits = (
                trainer.roles.policy(torch.tensor([prompt + response.tokens])).logits[0].double()
            )
        for step, token in enumerate(response.tokens):
            probabilities = (logits[len(prompt) - 1 + step] / temperature).softmax(-1)
            below = probabilities[:token].sum()
            assert below - 1e-6 <= uniforms[row, step] <= below + probabilities[token] + 1e-6
            logprob = rollout.logprobs[row, step].item()
            assert logprob == pytest.approx(probabilities[token].log().item(), abs=1e-4)


def returns_by_hand(trainer: PpoTrainer, beta: float, whiten: bool) -> list[float]:
    """Sums of the rewards that follow each token: -beta * log-ratio, and the score at the end."""
    rollout = trainer.rollout(trainer.sample_prompts())
    ratios = rollout.logprobs - rollout.ref_logprobs
    lengths = [len(response.tokens) for response in rollout.responses]
    rewards = [
        [-beta * x for x in row[:n].tolist()] for row, n in zip(ratios, lengths, strict=True)
    ]
    for row, score in zip(rewards, rollout.scores.tolist(), strict=True):
        row[-1] += score
    if whiten:
        numbers = torch.tensor([x for row in rewards for x in row], dtype=torch.float64)
        mean, std = numbers.mean().item(), numbers.std(unbiased=False).item()
        rewards = [[(x - mean) / std + mean for x in row] for row in rewards]
    expected = [sum(row[step:]) for row in rewards for step in range(len(row))]
    assert rollout.returns[rollout.mask].tolist() == pytest.approx(expected, abs=1e-3)
    return expected


def test_rewards_are_whitened_without_a_shift_of_their_mean(make_trainer):
    """With gamma and lambda 1, a return is the sum of the rewards from its token on."""
    same = {"moved": 0.3, "gamma": 1.0, "lam": 1.0, "kl_coef": 0.3}
    plain = returns_by_hand(make_trainer(**same), 0.3, whiten=False)
    whitened = returns_by_hand(make_trainer(whiten_rewards=True, **same), 0.3, whiten=True)
    assert whitened != pytest.approx(plain, rel=0.1)


def test_rewards_have_the_controllers_beta(make_trainer):
    trainer = make_trainer(moved=0.3, gamma=1.0, lam=1.0, kl_coef=0.1)
    trainer.kl_controller.kl_coef = 2.0
    returns_by_hand(trainer, 2.0, whiten=False)


def gradient_norm(model: torch.nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def test_policy_and_critic_are_clipped_apart(make_trainer, shift):
    """To a norm below that of one of them, and above that of the other."""
    norms = {}
    for limit in (1e9, None):
        trainer = make_trainer(moved=0.3)
        roles = trainer.roles
        rollout = trainer.rollout(trainer.sample_prompts())
        if limit is None:
            smaller, larger = sorted(norms.values())
            assert smaller < 0.8 * larger
            limit = (smaller + larger) / 2
        trainer.params = trainer.params.model_copy(update={"max_grad_norm": limit})
        for optimizer in trainer.optimizers.values():
            optimizer.step = lambda: None
        metrics = trainer.optimizer_step(rollout, list(range(BATCH)))
        clipped = {"policy": gradient_norm(roles.policy), "critic": gradient_norm(roles.critic)}
        if not norms:
            norms = clipped
    assert clipped == pytest.approx({name: min(norm, limit) for name, norm in norms.items()})
    for name, norm in norms.items():
        assert metrics[f"{name}_grad_norm"] == pytest.approx(norm)


def test_a_policy_that_does_not_run_as_a_whole_as_it_does_in_parts_is_an_error(make_trainer):
    """The reference moves with the policy, so their KL stays 0; what the rollout computed is not
    what the whole model gives.
    """
    trainer = make_trainer()
    rollout = trainer.rollout(trainer.sample_prompts())
    trainer.check_rollout(rollout)
    with torch.no_grad():
        trainer.roles.policy.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(RondoError, match=r"off by \d.* and 0 nats"):
        trainer.check_rollout(rollout)


def test_a_check_at_another_temperature_is_an_error(make_trainer):
    trainer = make_trainer(temperature=0.7)
    rollout = trainer.rollout(trainer.sample_prompts())
    trainer.params = trainer.params.model_copy(update={"temperature": 1.0})
    with pytest.raises(RondoError, match="off by"):
        trainer.check_rollout(rollout)
