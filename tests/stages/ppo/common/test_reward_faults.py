"""A further reward that failed is never a number: six faults of a real server, in real updates."""

import math
import threading
import time

import pytest
import torch

from stages.lib.core import http_session
from stages.lib.core.errors import RewardsFailed
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.responses import Response
from stages.ppo.common.rewards import (
    FailedReward,
    FunctionReward,
    RewardInputs,
    RewardResults,
    Rewards,
    RewardServer,
)
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.ppo.servers import LengthServer, length_server

SETTINGS = {
    "batch_size": 8,
    "mini_batch_size": 8,
    "micro_batch_size": 8,
    "total_episodes": 32,
    "response_length": 4,
    "max_failed_rewards": 0.25,
    "score_clip": 100.0,
    "num_ppo_epochs": 1,
}
PROMPTS = [({"id": f"p{i}", "prompt": f"{i}:"}, [5 + i, 6]) for i in range(8)]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_session, "TRIES", 2)
    monkeypatch.setattr("stages.ppo.common.rewards.TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(http_session, "BACKOFF_SECONDS", 0.0)
    with length_server() as server:
        yield server


@pytest.fixture
def trainer(server, make_roles):
    roles = make_roles(lora=LoraParams(r=4))
    roles.rewards = Rewards({"far": RewardServer("far", server.url, str)}, {"far": 0.1})
    return PpoTrainer(roles, PROMPTS, PpoParams(**SETTINGS), seed=0)


def weights(trainer):
    return [
        parameter.detach().clone()
        for model in (trainer.roles.policy, trainer.roles.critic)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]


def swapped(values):
    return [values[1], values[0], *values[2:]]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda reply: 500, "too many 500 error responses"),
        (lambda reply: 400, "400 Client Error"),
        (lambda reply: reply | {"rewards": reply["rewards"][:-1]}, "7 rewards for 8 responses"),
        (lambda reply: reply | {"rewards": [math.nan] * 8}, "returned nan, not a finite number"),
        (
            lambda reply: (
                reply | {"rewards": swapped(reply["rewards"]), "ids": swapped(reply["ids"])}
            ),
            r"sent ids \['p\d#0', 'p\d#1'.* but the reply has \['p\d#1', 'p\d#0'",
        ),
        (lambda reply: {"scores": [1.0] * 8}, "the reply has no key `rewards`"),
        (lambda reply: ["rewards"], "the reply has no key `rewards`"),
    ],
    ids=["500", "400", "wrong length", "NaN", "swapped order", "no rewards", "not an object"],
)
def test_a_fault_of_the_whole_reply_stops_the_run_without_an_update(server, trainer, spoil, reason):
    server.spoil = spoil
    before = weights(trainer)
    with pytest.raises(
        RewardsFailed,
        match=rf"rewards of 100% of the responses failed; .* 8 of 8 rewards failed, "
        rf"ppo\.rewards far: .*{reason}",
    ):
        trainer.step()
    assert trainer.updates == 0
    assert all(map(torch.equal, before, weights(trainer)))


def test_a_server_that_does_not_answer_in_time_stops_the_run(server, trainer):
    server.answering.clear()
    with pytest.raises(RewardsFailed, match=r"far: .*2 tries at most: .*[Rr]ead timed out"):
        trainer.step()
    assert len(server.requests) == 2


def test_another_model_behind_the_address_stops_the_run(server, trainer):
    trainer.step()
    server.model = "length-2"
    with pytest.raises(
        RewardsFailed,
        match=f"far: {server.url} started with the model length-1, and now states length-2",
    ):
        trainer.step()
    assert trainer.updates == 1


def test_the_model_of_the_start_is_part_of_the_resume_state(server, trainer):
    trainer.step()
    state = trainer.state()
    trainer.roles.rewards.sources["far"].models.clear()
    trainer.load_state(state)
    server.model = "length-2"
    with pytest.raises(RewardsFailed, match="model length-1, and now states length-2"):
        trainer.step()


def test_a_server_that_states_neither_model_nor_ids_is_accepted(server, trainer):
    server.spoil = lambda reply: {"rewards": reply["rewards"]}
    rollout, metrics = trainer.step()
    assert len(rollout.rows) == 8 and metrics["reward_failed_share"] == 0


@pytest.mark.parametrize("fault", ["500", "timeout"])
def test_a_fault_that_passes_is_retried(server, trainer, fault):
    def first_fails(reply):
        return 500 if len(server.requests) == 1 else reply

    if fault == "500":
        server.spoil = first_fails
    else:
        server.answering.clear()

        def answer_the_second_request():
            server.received.wait()
            time.sleep(0.45)
            server.answering.set()

        threading.Thread(target=answer_the_second_request, daemon=True).start()
    rollout, metrics = trainer.step()
    assert len(server.requests) == 2
    assert len(rollout.rows) == 8 and metrics["reward_failed_share"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5"])
def test_failed_episodes_are_left_out_and_counted(server, trainer, value):
    """Episodes 2 and 5 of the request fail, and with them a quarter of the rollout."""

    def spoil(reply):
        for failed in (2, 5):
            reply["rewards"][failed] = value
        return reply

    server.spoil = spoil
    rollout, metrics = trainer.step()
    request = server.requests[0]
    kept = [query for i, query in enumerate(request["query"]) if i not in (2, 5)]
    assert [
        row["prompt"] + response.text
        for row, response in zip(rollout.rows, rollout.responses, strict=True)
    ] == kept
    assert rollout.parts["far"] == [len(query) for query in kept]
    assert metrics["reward_failed_share"] == 0.25
    assert metrics["score_far"] == pytest.approx(sum(map(len, kept)) / 6)
    assert (
        metrics["response_length"]
        == sum(len(response.tokens) for response in rollout.responses) / 6
    )
    assert rollout.failures == [
        f"2 of 8 rewards failed, ppo.rewards far: returned {value!r}, not a finite number"
    ]
    assert trainer.updates == 1


def test_above_the_share_the_run_stops(server, trainer):
    server.spoil = lambda reply: reply | {"rewards": [None] * 3 + reply["rewards"][3:]}
    with pytest.raises(RewardsFailed, match=r"of 38% .* ppo\.max_failed_rewards is 0\.25"):
        trainer.step()


class GivenResponses(Roles):
    """In place of sampling: the response of each prompt."""

    def sample(self, prompt_ids, *_):
        tokens = [[ids[0] + 3, ids[0] % 5 + 10, 2][ids[0] % 2 :] for ids in prompt_ids]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [Response(*row, ended=True) for row in zip(prompt_ids, tokens, texts, strict=True)]


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_an_update_is_that_of_the_episodes_that_are_left(make_roles, value_head, micro_batch_size):
    """Of eight episodes, 1 and 6 fail; the other trainer has only the other six."""

    def reward(prompts, texts):
        return [
            None if prompt in ("1:", "6:") else len(text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def updated(prompts, **changes):
        roles = make_roles(GivenResponses, lora=LoraParams(r=4), value_head=value_head)
        roles.rewards = Rewards(
            {"length": FunctionReward(reward, "ppo.rewards mine")}, {"length": 0.1}
        )
        trainer = PpoTrainer(
            roles,
            PROMPTS,
            PpoParams(**SETTINGS | changes, whiten_rewards=True, entropy_coef=0.1),
            0,
        )
        rollout = trainer.rollout(prompts)
        return weights(trainer), trainer.optimize(rollout), weights(trainer)

    before, metrics, after = updated(PROMPTS, micro_batch_size=micro_batch_size)
    left = [episode for i, episode in enumerate(PROMPTS) if i not in (1, 6)]
    sizes = {"batch_size": 6, "mini_batch_size": 6, "micro_batch_size": 6}
    _, expected_metrics, expected = updated(left, **sizes)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert metrics == pytest.approx(expected_metrics, abs=1e-4)


def test_a_function_that_raises_is_named_with_its_line():
    def reward(prompts, texts):
        raise KeyError("answer")

    inputs = RewardInputs([PROMPTS[0][0]], [Response([1], [2], "5", ended=True)])
    [result] = FunctionReward(reward, "ppo.rewards mine")(inputs)
    assert isinstance(result, FailedReward)
    assert result.reason.startswith("KeyError: 'answer' (") and __file__ in result.reason


def test_one_failed_reward_of_several_leaves_the_response_out():
    failed = FailedReward("no")
    results = RewardResults(3, {"a": [1.0, failed, 3.0], "b": [failed, failed, 6.0]})
    assert results.kept == [2] and results.parts == {"a": [3.0], "b": [6.0]}
    assert results.failed_share == pytest.approx(2 / 3)
    assert results.failures == [
        "2 of 3 rewards failed, ppo.rewards b: no",
        "1 of 3 rewards failed, ppo.rewards a: no",
    ]
    results.check_share(0.67)
    with pytest.raises(RewardsFailed, match="of 67% of the responses"):
        results.check_share(0.66)


def test_no_share_allows_a_rollout_without_any_reward():
    with pytest.raises(RewardsFailed):
        RewardResults(1, {"a": [FailedReward("no")]}).check_share(1.0)


class WaitingRoles(Roles):
    """Its reward model scores only when the request to the server has come, which is answered only
    after that.
    """

    server: LengthServer

    def raw_scores(self, packed, shared):
        assert self.server.received.wait(20), "no request before the forward passes"
        assert not self.server.answering.is_set()
        scores = super().raw_scores(packed, shared)
        self.server.answering.set()
        return scores


def test_requests_overlap_with_the_forward_passes(server, make_roles, monkeypatch):
    monkeypatch.setattr("stages.ppo.common.rewards.TIMEOUT_SECONDS", 60)
    roles = make_roles(WaitingRoles, lora=LoraParams(r=4))
    roles.server = server
    roles.rewards = Rewards({"far": RewardServer("far", server.url, str)}, {"far": 0.1})
    server.answering.clear()
    rollout, _ = PpoTrainer(roles, PROMPTS, PpoParams(**SETTINGS), seed=0).step()
    assert rollout.parts["far"] == [len(query) for query in server.requests[0]["query"]]


def test_functions_run_in_the_main_thread():
    def in_main_thread(prompts, texts):
        return [float(threading.current_thread() is threading.main_thread())]

    rewards = Rewards({"mine": FunctionReward(in_main_thread, "key")}, {"mine": 1.0})
    inputs = RewardInputs([PROMPTS[0][0]], [Response([1], [2], "5", ended=True)])
    assert rewards.start(inputs)().parts == {"mine": [1.0]}
