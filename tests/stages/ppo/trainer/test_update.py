"""The trainer on a tiny Llama: its contract, that it learns a reward with a known optimum, and that
the KL term holds it back.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stages.lib.core.errors import Diverged, RondoError
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.packing import Packed
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.update import PpoTrainer

LIKED, EOS = 7, 2
SETTINGS = {
    "batch_size": 32,
    "mini_batch_size": 32,
    "micro_batch_size": 16,
    "total_episodes": 32 * 25,
    "response_length": 8,
    "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "kl_control": "fixed",
    "missing_eos_penalty": 0.0,
}


@dataclass
class LikesOneToken(Roles):
    """A reward with a known optimum: the share of one token in the response, times 4."""

    def raw_scores(self, packed: Packed, shared: Tensor) -> tuple[Tensor, list[Tensor]]:
        liked, written = (
            packed.to_rows(which.float()).sum(1)
            for which in (packed.targets == LIKED, packed.targets != EOS)
        )
        return 4 * liked / written.clamp(min=1), super().raw_scores(packed, shared)[1]


@pytest.fixture
def roles(make_roles):
    return make_roles(LikesOneToken, lora=LoraParams(r=8))


def run(roles: Roles, seed: int = 0, **changes: float) -> list[dict[str, float]]:
    params = PpoParams(**(SETTINGS | changes))
    prompts = [({"id": str(i), "prompt": str(i)}, [5 + i % 20, 6]) for i in range(64)]
    trainer = PpoTrainer(roles, prompts, params, seed)
    return [trainer.step()[1] for _ in range(trainer.planned_updates)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_a_known_optimum(roles, seed):
    """The optimum is 4 (every token the liked one); chance is 0.1. Three quarters of it must be
    reached in 40 updates.
    """
    metrics = run(roles, seed, kl_coef=0.0, total_episodes=32 * 40)
    assert metrics[0]["score_mean"] < 0.3
    assert metrics[-1]["score_mean"] > 3.0


@pytest.mark.parametrize(
    ("made_of", "changes"),
    [
        ({"lora": LoraParams(r=0)}, {}),
        ({"lora": LoraParams(r=8), "value_head": True}, {}),
        ({"lora": LoraParams(r=8)}, {"loss_level": "sequence"}),
    ],
    ids=["all weights", "value head", "sequence-level loss"],
)
def test_learns_in_every_configuration(make_roles, made_of, changes):
    metrics = run(
        make_roles(LikesOneToken, **made_of), kl_coef=0.0, total_episodes=32 * 40, **changes
    )
    assert metrics[0]["score_mean"] < 0.3 and metrics[0]["kl"] == 0.0
    assert metrics[-1]["score_mean"] > 3.0


def test_a_large_kl_coefficient_holds_the_policy_at_the_reference(make_roles):
    """Mean KL (k3, which varies less) of the last five updates, in nats a sequence."""
    held, free = (
        sum(
            row["kl_k3"]
            for row in run(
                make_roles(LikesOneToken, lora=LoraParams(r=8)), kl_coef=beta, learning_rate=3e-3
            )[-5:]
        )
        / 5
        for beta in (10.0, 0.0)
    )
    assert held < 1 < 10 < free


def test_first_update_starts_at_ratio_one_and_kl_zero(roles):
    first = run(roles, total_episodes=32, num_ppo_epochs=1)[0]
    assert first["kl"] == 0.0
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_policy_that_is_not_the_reference_breaks_the_contract(roles):
    for name, parameter in roles.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(RondoError, match="ratio must be 1 and the KL 0"):
        run(roles, total_episodes=32)


def test_micro_batches_change_memory_not_results(roles, tiny_lm):
    """Gradients add up over micro-batches; float32 sums in another order differ a little."""
    initial = {
        name: p.detach().clone() for name, p in roles.policy.named_parameters() if p.requires_grad
    }
    critic = {
        name: p.detach().clone() for name, p in roles.critic.named_parameters() if p.requires_grad
    }
    results = []
    for size in (32, 8):
        with torch.no_grad():
            for model, state in ((roles.policy, initial), (roles.critic, critic)):
                for name, parameter in model.named_parameters():
                    if name in state:
                        parameter.copy_(state[name])
        results.append(run(roles, total_episodes=64, micro_batch_size=size)[0])
    for name in ("policy_loss", "value_loss", "policy_grad_norm", "critic_grad_norm"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-3, abs=1e-5)


def test_critic_off_is_the_reward_model(roles, tiny_reward_model):
    """The value head trains on a copy: the reward model under it must not move."""
    run(roles, total_episodes=64)
    packed = PpoTrainer(roles, [({"prompt": ""}, [5])] * 32, PpoParams(**SETTINGS), 0).packed(
        [[5, 6]], [[7, 8, 2]], range(1)
    )
    score = tiny_reward_model()(torch.tensor([[5, 6, 7, 8, 2]])).logits.item()
    with torch.no_grad():
        _, states, shared = roles.ref_logprobs(packed, 1.0)
        scores, entering = Roles.raw_scores(roles, packed, shared)
        assert scores.item() == pytest.approx(score, abs=1e-5)
        assert roles.live(packed, states, entering, 1.0).values[0, -1].item() != pytest.approx(
            score, abs=1e-3
        )


@pytest.mark.parametrize("ill", ["score", "gradient"])
def test_what_is_not_finite_stops_the_run_and_is_not_applied(roles, monkeypatch, ill):
    params = PpoParams(**SETTINGS)
    trainer = PpoTrainer(
        roles, [({"prompt": str(i)}, [5 + i % 20, 6]) for i in range(64)], params, seed=0
    )
    trainer.step()
    weights = {
        name: p.detach().clone() for name, p in roles.policy.named_parameters() if p.requires_grad
    }
    if ill == "score":
        scores = roles.raw_scores
        monkeypatch.setattr(
            roles,
            "raw_scores",
            lambda *given: (scores(*given)[0] * float("nan"), scores(*given)[1]),
        )
    else:
        next(p for p in roles.policy.parameters() if p.requires_grad).register_hook(
            lambda gradient: gradient / 0
        )
    with pytest.raises(
        Diverged, match="raw_scores not finite" if ill == "score" else "policy_grad_norm not finite"
    ):
        trainer.step()
    assert all(
        torch.equal(p, weights[name])
        for name, p in roles.policy.named_parameters()
        if p.requires_grad
    )


def test_scheduler_warms_up_and_decays(roles):
    rates = [
        m["learning_rate"]
        for m in run(roles, total_episodes=32 * 10, num_ppo_epochs=1, warmup_updates=2)
    ]
    # logged after the step: update 1 -> 2/3 * 0.91, update 2 -> 1 * 0.82, the last 0.1 of 1e-2
    assert rates[0] == pytest.approx(1e-2 * 2 / 3 * 0.91)
    assert rates[1] == pytest.approx(1e-2 * 0.82)
    assert rates[-1] == pytest.approx(1e-3)
