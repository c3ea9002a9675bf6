"""Further rewards (`ppo.rewards`), each configured as a user would configure it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.responses import Response
from stages.ppo.common.rewards import FailedReward, RewardInputs, load_rewards
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.ppo.servers import length_server

PROMPTS, RESPONSES = ["The day", "The night"], [" was good.", " was long and dark."]
INPUTS = RewardInputs(
    [{"id": "a:1", "prompt": PROMPTS[0]}, {"id": "a:2", "prompt": PROMPTS[1]}],
    [
        Response([1], [5, 6, 2], RESPONSES[0], ended=True),
        Response([1], [5, 6, 7, 8, 9], RESPONSES[1], ended=False),
    ],
)


def with_rewards(params: Params, *sources: dict) -> Params:
    return check_params(
        params.model_dump() | {"ppo": params.ppo.model_dump() | {"rewards": list(sources)}}, "test"
    )


@pytest.fixture
def params() -> Params:
    return check_params({}, "test")


def test_a_python_function_of_the_users_own(tmp_path, monkeypatch, params):
    (tmp_path / "my_taste.py").write_text(
        "def short(prompts, responses):\n    return [-len(r) / 10 for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    params = with_rewards(params, {"name": "short", "function": "my_taste:short", "weight": 0.5})
    rewards = load_rewards(params)
    assert rewards.start(INPUTS)().by_name == {"short": [-1.0, -1.9]}
    assert rewards.weights == {"short": 0.5}


@pytest.mark.parametrize("function", ["no_such_module:reward", "json:no_such_function"])
def test_a_missing_function_is_named(params, function):
    with pytest.raises(BadInput, match=f"ppo.rewards mine: {function} cannot be imported"):
        load_rewards(with_rewards(params, {"name": "mine", "function": function}))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[1.0]", "returned 1 rewards for 2 responses"),
        ("1.0", "returned 1.0, not a list of numbers"),
        ("[float('nan')] * 2", "returned nan, not a finite number"),
        ("['a', 'a']", "returned 'a', not a finite number"),
        ("[[1.0]] * 2", "returned [1.0], not a finite number"),
    ],
)
def test_a_result_that_is_not_one_number_per_response_is_a_failure(
    tmp_path, monkeypatch, params, body, reason
):
    name = f"bad_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def reward(prompts, responses):\n    return {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    rewards = load_rewards(with_rewards(params, {"name": "mine", "function": f"{name}:reward"}))
    assert rewards.start(INPUTS)().by_name == {"mine": [FailedReward(reason)] * 2}


def test_another_reward_model(make_round):
    params = make_round("r0", 1.0)
    folder = Path("rounds/r0/reward/model")
    rewards = load_rewards(with_rewards(params, {"name": "second", "model": str(folder)}))
    scores = rewards.start(INPUTS)().by_name["second"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, response, score in zip(PROMPTS, RESPONSES, scores, strict=True):
        ids = tokenizer(prompt).input_ids + tokenizer(response).input_ids + [tokenizer.eos_token_id]
        with torch.no_grad():
            raw = model(torch.tensor([ids])).logits.item()
        # make_round calibrates by mean 0.5, standard deviation 2
        assert score == pytest.approx((raw - 0.5) / 2.0, abs=1e-4)


@pytest.fixture
def server():
    with length_server() as server:
        yield server


def test_a_reward_model_over_http(server, make_round):
    rewards = load_rewards(with_rewards(make_round("r0", 1.0), {"name": "far", "url": server.url}))
    assert rewards.start(INPUTS)().by_name == {"far": [17.0, 28.0]}
    assert server.requests == [
        {
            "query": ["The day was good.", "The night was long and dark."],
            "prompts": PROMPTS,
            "labels": [None, None],
            "ids": ["a:1#0", "a:2#1"],
            "columns": {},
            "finish_reasons": ["stop", "length"],
            "token_counts": [3, 5],
        }
    ]


def test_a_server_gets_texts_that_begin_with_bos(server, make_round, bos_tokenizer):
    """OpenRLHF's servers tokenise without special tokens."""
    params = with_rewards(make_round("r0", 1.0), {"name": "far", "url": server.url})
    Path("assets/model").unlink()  # a link to the model of all tests
    bos_tokenizer.save_pretrained("assets/model")
    load_rewards(params).start(INPUTS)()
    assert server.requests[0]["query"][0] == "<|begin|>The day was good."


def test_a_reward_has_exactly_one_kind_and_a_name_of_its_own(params):
    for wrong in ({"name": "both", "model": "a", "url": "http://b"}, {"name": "none"}):
        with pytest.raises(BadInput, match="exactly one of model, function, url"):
            with_rewards(params, wrong)
    with pytest.raises(BadInput, match="must differ"):
        with_rewards(params, {"name": "a", "model": "x"}, {"name": "a", "model": "y"})


def test_the_score_is_the_weighted_sum_and_each_part_is_logged(
    tmp_path, monkeypatch, params, make_roles
):
    (tmp_path / "counts.py").write_text(
        "def tokens(prompts, responses):\n    return [len(r.split()) for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    params = with_rewards(params, {"name": "tokens", "function": "counts:tokens", "weight": 0.1})
    changes = {"response_length": 6, "missing_eos_penalty": 0.0, "score_clip": 100.0}
    ppo = params.ppo.model_copy(update={"reward_weight": 2.0, **changes})
    roles = make_roles(lora=LoraParams(r=4))
    roles.rewards = load_rewards(params)
    prompts = [({"id": str(i), "prompt": ""}, [5 + i % 20]) for i in range(32)]
    trainer = PpoTrainer(roles, prompts, ppo, seed=0)
    rollout, metrics = trainer.step()
    # one word of a text is one token of the test tokenizer
    assert rollout.parts["tokens"] == [len(response.tokens) for response in rollout.responses]
    expected = [
        2.0 * float(c) + 0.1 * n
        for c, n in zip(rollout.calibrated, rollout.parts["tokens"], strict=True)
    ]
    assert rollout.scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics["score_tokens"] == pytest.approx(sum(rollout.parts["tokens"]) / 32)
    assert metrics["reward_mean"] == pytest.approx(sum(expected) / 32, abs=1e-5)
