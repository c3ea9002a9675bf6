"""The trainer on a tiny Llama: it learns a reward with a known optimum, the KL penalty holds it
back, and it stops on errors.
"""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from scipy import stats
from torch import Tensor

from stages.lib.core.errors import Diverged, RondoError
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.packing import Packed
from stages.lib.lm.responses import Response
from stages.ppo.trainer.advantages import ppo
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.update import PpoTrainer, check_initial_ratio, draw_mini_batches

REWARDED_TOKEN, EOS = 7, 2
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


class OneTokenReward(Roles):
    """A reward with a known optimum: 4 times the share of one token in the response."""

    def raw_scores(self, packed: Packed, shared: Tensor) -> tuple[Tensor, list[Tensor]]:
        rewarded, tokens = (
            packed.to_rows(matches.float()).sum(1)
            for matches in (packed.targets == REWARDED_TOKEN, packed.targets != EOS)
        )
        return 4 * rewarded / tokens.clamp(min=1), super().raw_scores(packed, shared)[1]


@pytest.fixture
def roles(make_roles):
    return make_roles(OneTokenReward, lora=LoraParams(r=8))


def run(roles: Roles, **changes: float) -> list[dict[str, float]]:
    params = PpoParams(**(SETTINGS | changes))
    prompts = [({"id": str(i), "prompt": str(i)}, [5 + i % 20, 6]) for i in range(64)]
    trainer = PpoTrainer(roles, prompts, params, seed=0)
    return [trainer.step()[1] for _ in range(trainer.planned_updates)]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"lora": LoraParams(r=8)}, {}),
        ({"lora": LoraParams(r=0)}, {}),
        ({"lora": LoraParams(r=8), "value_head": True}, {}),
        ({"lora": LoraParams(r=8)}, {"loss_level": "sequence"}),
    ],
    ids=["adapters", "all weights", "value head", "sequence-level loss"],
)
def test_learns_a_known_optimum_in_every_configuration(make_roles, options, changes):
    """The optimum is 4 (every token is the rewarded one); chance is 0.1. Three quarters of the
    optimum must be reached in 40 updates.
    """
    roles = make_roles(OneTokenReward, **options)
    metrics = run(roles, kl_coef=0.0, total_episodes=32 * 40, **changes)
    assert metrics[0]["score_mean"] < 0.3 and metrics[0]["kl"] == 0.0
    assert metrics[-1]["score_mean"] > 3.0


def test_the_first_ratio_is_not_checked_where_a_process_has_no_episode_left(roles):
    trainer = PpoTrainer(roles, [({"prompt": "0"}, [5, 6])] * 32, PpoParams(**SETTINGS), 0)
    rollout = replace(trainer.rollout(trainer.sample_prompts()), own=[])
    spare = trainer.pack_episodes(rollout.responses, [0])
    check_initial_ratio(roles, [], spare, rollout, 1.0)


def test_the_sequence_level_loss_has_a_clip_range_of_its_own():
    params = PpoParams(**SETTINGS, loss_level="sequence", cliprange=9.0, cliprange_sequence=0.1)
    algorithm, ones = ppo(params), torch.ones(1, 2)
    loss, clipped = algorithm.loss(0.5 * ones, 0 * ones, ones, ones.bool(), algorithm.clip)
    # the ratio is exp(0.5), clipped to 1.1
    assert (loss.item(), clipped.item()) == (pytest.approx(-1.1), 1.0)


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(8, 8, [8]), (8, 4, [4, 4]), (5, 4, [2, 3]), (12, 4, [4, 4, 4])]
)
def test_mini_batches_have_equal_sizes_and_as_much_of_each_part_of_the_batch(count, size, sizes):
    generator = torch.Generator().manual_seed(0)
    draws = [draw_mini_batches(count, size, generator) for _ in range(20)]
    for mini_batches in draws:
        assert sorted(chain(*mini_batches)) == list(range(count))
        assert sorted(map(len, mini_batches)) == sizes
        # each of every K consecutive episodes is in another one of the K mini-batches
        for mini_batch in mini_batches:
            groups = [episode // len(sizes) for episode in mini_batch]
            assert len({*groups}) == len(groups)
    assert len(sizes) == 1 or len({str(mini_batches) for mini_batches in draws}) > 1


def test_a_large_kl_coefficient_holds_the_policy_at_the_reference(make_roles):
    """Mean KL of the last five updates, in nats per sequence."""

    def last_kl(beta: float) -> float:
        roles = make_roles(OneTokenReward, lora=LoraParams(r=8))
        metrics = run(roles, kl_coef=beta, learning_rate=3e-3)
        return sum(row["kl"] for row in metrics[-5:]) / 5

    assert last_kl(beta=10.0) < 1
    assert last_kl(beta=0.0) > 5


def test_beta_follows_the_kl_per_token_of_the_rollout(roles):
    """The first rollout is SFT's, and its length counts. The rule has kl / target - 1 and the share
    of the horizon; here it doubles beta.
    """
    params = PpoParams(
        **(SETTINGS | {"kl_control": "adaptive", "kl_horizon": 64, "total_episodes": 96}),
        kl_coef=0.1,
        target_kl_per_token=0.5,
    )
    prompts = [({"id": str(i), "prompt": str(i)}, [5 + i % 20, 6]) for i in range(64)]
    trainer, calls = PpoTrainer(roles, prompts, params, seed=0), []
    trainer.kl_controller.rule = lambda *arguments: calls.append(arguments) or 2.0
    metrics, sft_length = [], None
    for _ in range(3):
        rollout, row = trainer.step()
        sft_length = sft_length or sum(len(response.tokens) for response in rollout.responses) / 32
        kls = rollout.sequence_kl.numpy()
        assert row["kl_per_token"] == pytest.approx(kls.mean() / sft_length)
        assert row["kl_per_token_se"] == pytest.approx(stats.sem(kls) / sft_length)
        metrics.append(row)
    assert row["response_length"] != pytest.approx(sft_length)
    assert calls == [(row["kl_per_token"] / 0.5 - 1, 0.5) for row in metrics]
    assert [row["kl_coef"] for row in metrics] == [0.1, 0.2, 0.4]
    assert metrics[-1]["kl_per_token"] > 0 and metrics[-1]["kl"] > metrics[-1]["kl_per_token"]


def test_a_policy_that_is_not_the_reference_at_the_start_is_an_error(roles):
    for name, parameter in roles.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(RondoError, match="ratio must be 1 and the KL 0"):
        run(roles, total_episodes=32)


def trained_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_micro_batches_change_memory_not_results(roles):
    """Gradients add up over micro-batches; float32 sums in another order differ a little."""
    models = (roles.policy, roles.critic)
    initial_weights = [trained_weights(model) for model in models]
    metrics = []
    for size in (32, 8):
        with torch.no_grad():
            for model, weights in zip(models, initial_weights, strict=True):
                for name, weight in weights.items():
                    model.get_parameter(name).copy_(weight)
        metrics.append(run(roles, total_episodes=64, micro_batch_size=size)[0])
    for name in ("policy_loss", "value_loss", "policy_grad_norm", "critic_grad_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-5)


def test_the_critic_without_its_adapter_is_the_reward_model(roles, tiny_reward_model):
    """The value head is a trained copy: the reward model under it must not change."""
    run(roles, total_episodes=64)
    trainer = PpoTrainer(roles, [({"prompt": ""}, [5])] * 32, PpoParams(**SETTINGS), 0)
    packed = trainer.pack_episodes([Response([5, 6], [7, 8, 2], "", ended=True)], range(1))
    score = tiny_reward_model()(torch.tensor([[5, 6, 7, 8, 2]])).logits.item()
    with torch.no_grad():
        hidden, _, shared = roles.run_reference(packed)
        scores, entering = Roles.raw_scores(roles, packed, shared)
        assert scores.item() == pytest.approx(score, abs=1e-5)
        values = roles.values(packed, entering, hidden)
        assert values[0, -1].item() != pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("name", ["raw_scores", "policy_grad_norm"])
def test_a_number_that_is_not_finite_stops_the_run_and_the_step_is_not_applied(
    roles, monkeypatch, name
):
    prompts = [({"prompt": str(i)}, [5 + i % 20, 6]) for i in range(64)]
    trainer = PpoTrainer(roles, prompts, PpoParams(**SETTINGS), seed=0)
    trainer.step()
    weights = trained_weights(roles.policy)
    if name == "raw_scores":
        raw_scores = roles.raw_scores

        def nan_scores(*arguments):
            scores, states = raw_scores(*arguments)
            return scores * float("nan"), states

        monkeypatch.setattr(roles, "raw_scores", nan_scores)
    else:
        parameter = next(p for p in roles.policy.parameters() if p.requires_grad)
        parameter.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(Diverged, match=f"{name} not finite"):
        trainer.step()
    weights_after = trained_weights(roles.policy)
    assert weights_after.keys() == weights.keys()
    assert all(torch.equal(weights_after[name], weight) for name, weight in weights.items())


def test_scheduler_warms_up_and_decays(roles):
    metrics = run(roles, total_episodes=32 * 10, num_ppo_epochs=1, warmup_updates=2)
    rates = [row["learning_rate"] for row in metrics]
    # logged after the step: update 1 -> 2/3 * 0.91, update 2 -> 1 * 0.82, the last 0.1 of 1e-2
    assert rates[0] == pytest.approx(1e-2 * 2 / 3 * 0.91)
    assert rates[1] == pytest.approx(1e-2 * 0.82)
    assert rates[-1] == pytest.approx(1e-3)
