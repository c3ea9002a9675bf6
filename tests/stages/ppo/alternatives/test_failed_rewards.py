"""RLOO, GRPO and best-of-n leave out responses whose further rewards failed."""

import math
from pathlib import Path

import pytest
import torch

from stages.lib.core.errors import RewardsFailed
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.responses import Response
from stages.ppo.alternatives.best_of_n import choose
from stages.ppo.alternatives.run import load
from stages.ppo.alternatives.stage import TrainedPolicy, TrainingContext
from stages.ppo.trainer.rollout import describe
from tests.stages.ppo.servers import length_server
from tests.stages.ppo.stage_process import double_prompts
from tests.stages.ppo.trainer.test_online import make_trainer

ONLY_FURTHER = {"reward_weight": 0.0, "missing_eos_penalty": 0.0, "score_clip": 100.0}


@pytest.fixture
def write_function(tmp_path, monkeypatch):
    """A module whose function returns these rewards; its source in `ppo.rewards`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, body: str) -> list[dict]:
        Path(f"{name}.py").write_text(f"def reward(prompts, responses):\n    return {body}\n")
        return [{"name": "mine", "function": f"{name}:reward"}]

    return write


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # less the mean of the others
        ("rloo", [-4.5, 0.0, 4.5, -4 / 3, -4 / 3, -4 / 3, 4.0]),
        # less the mean of 3 and of 2, divided by the standard deviation of 3 and of 2
        ("grpo", [-1.0, 0.0, 1.0, -0.5, -0.5, -0.5, 1.5]),
    ],
)
def test_the_others_of_a_group_are_compared_without_a_failed_one(
    make_params, write_function, algorithm, expected
):
    rewards = write_function(f"one_fails_{algorithm}", "[0, None, 3, 6, 1, 1, 1, 5]")
    ppo = {"rewards": rewards, "max_failed_rewards": 0.125, **ONLY_FURTHER}
    ppo |= {"batch_size": 8, "mini_batch_size": 8}
    params = make_params(algorithm, {"num_generations": 4, "beta": 0.0}, **ppo)
    double_prompts()
    trainer = make_trainer(params)
    batch = trainer.sample_prompts()
    rollout = trainer.rollout(batch)
    assert rollout.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert rollout.rows == [batch[index][0] for index in (0, 2, 3, 4, 5, 6, 7)]
    metrics = describe(rollout, 1.0, has_critic=False)
    assert metrics["reward_failed_share"] == 0.125
    assert metrics["reward_mean"] == pytest.approx(17 / 7)


def test_best_of_n_chooses_among_the_others(make_params, write_function, capsys):
    """All rewards of the first prompt fail, and the best one of the second."""
    rewards = write_function(
        "some_fail", "[None] * 4 + [1, None, 3, 2] + [i % 4 for i in range(8, len(prompts))]"
    )
    ppo = {"rewards": rewards, "max_failed_rewards": 0.5, **ONLY_FURTHER}
    context = load(make_params("best_of_n", {"n": 4}, **ppo), "r0")
    model = add_adapters(context.sft, context.params.ppo.lora, "CAUSAL_LM").eval()
    choice = choose(TrainedPolicy(model, context), context)
    assert " rewards failed, ppo.rewards mine: returned None" in capsys.readouterr().out
    assert choice.prompts == [tokens for _, tokens in context.prompts[1:]]
    best = [max(choice.rows[:3], key=lambda row: row["score_mine"]), *choice.rows[6::4]]
    assert [row["score_mine"] for row in best] == [3] * len(choice.prompts)
    assert [
        context.tokenizer.decode(response, skip_special_tokens=True)
        for response in choice.responses
    ] == [row["response"] for row in best]


def test_above_the_share_training_stops(make_params, write_function):
    rewards = write_function("one_in_four_fails", "[None, 1, 1, 1] * (len(prompts) // 4)")
    context = load(make_params("best_of_n", {"n": 4}, rewards=rewards), "r0")
    model = add_adapters(context.sft, context.params.ppo.lora, "CAUSAL_LM").eval()
    with pytest.raises(RewardsFailed, match="of 25% of the responses failed"):
        choose(TrainedPolicy(model, context), context)


def given_responses(context: TrainingContext, tokens: list[list[int]]) -> list[Response]:
    """In place of sampling: responses to the first prompts."""
    texts = context.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    prompts = [ids for _, ids in context.prompts[: len(tokens)]]
    return [Response(*row, ended=False) for row in zip(prompts, tokens, texts, strict=True)]


def test_a_fault_of_a_server_ends_training(make_params):
    """As in PPO (test_reward_faults.py has all faults): no number is made up, and the run stops."""
    with length_server() as server:
        rewards = [{"name": "far", "url": server.url}]
        context = load(make_params("best_of_n", {"n": 2}, rewards=rewards), "r0")
        policy = TrainedPolicy(context.sft, context)
        episodes = context.prompts[:3]
        responses = given_responses(context, [[5, 6], [5], [5, 6, 7]])
        scored = policy.score(1, episodes, responses)
        lengths = [len(query) for query in server.requests[0]["query"]]
        assert [row["score_far"] for row in scored.rows] == lengths
        server.spoil = lambda reply: reply | {"rewards": [math.nan] * 3}
        with pytest.raises(RewardsFailed, match=r"100% .* 3 of 3 rewards failed, .*returned nan"):
            policy.score(1, episodes, responses)
        server.spoil, server.model = lambda reply: reply, "length-2"
        with pytest.raises(RewardsFailed, match="model length-1, and now states length-2"):
            policy.score(1, episodes, responses)


def test_requests_overlap_with_the_forward_passes(make_params):
    """The server answers only after the reward model has started to score."""
    with length_server() as server:
        server.answering.clear()
        rewards = [{"name": "far", "url": server.url}]
        context = load(make_params("best_of_n", {"n": 2}, rewards=rewards), "r0")
        started = []

        def on_forward(*_: object) -> None:
            started.append(server.received.wait(20))
            server.answering.set()

        handle = next(
            module
            for module in context.reward_model.modules()
            if isinstance(module, torch.nn.LayerNorm) or "RMSNorm" in type(module).__name__
        ).register_forward_pre_hook(on_forward)
        policy = TrainedPolicy(
            add_adapters(context.sft, context.params.ppo.lora, "CAUSAL_LM"), context
        )
        responses = given_responses(context, [[5, 6]] * len(context.prompts))
        scored = policy.score(1, context.prompts, responses)
        handle.remove()
        assert started[0]
        lengths = [len(query) for query in server.requests[0]["query"]]
        assert [row["score_far"] for row in scored.rows] == lengths
