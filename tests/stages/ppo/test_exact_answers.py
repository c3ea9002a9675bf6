"""The example of exact answers from its data file to PPO's rollouts, through the stages."""

import shutil
from pathlib import Path

import pytest

from examples.exact_answer import solves
from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json, read_jsonl
from stages.lib.core.params import check_params
from stages.lib.core.params.policy import Algorithm
from stages.lib.data.rollouts import read_rollouts
from stages.ppo.__main__ import main as ppo
from stages.prepare.__main__ import main as prepare
from tests.paths import ROOT
from tests.stages.ppo.servers import length_server

REWARDS = [
    {"name": "exact", "function": "examples.exact_answer:exact"},
    {"name": "sum", "function": "sum_of_answer:reward"},
]


@pytest.fixture
def server():
    with length_server() as server:
        yield server


@pytest.fixture
def params(make_round, server, tmp_path, monkeypatch):
    made = make_round("r0", 1.0).model_dump(mode="json")
    shutil.copytree(ROOT / "examples", "examples")
    Path("sum_of_answer.py").write_text(
        "def reward(prompts, responses, answer, token_counts):\n"
        "    return [int(a) + n / 100 for a, n in zip(answer, token_counts)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    Path("assets/data").mkdir()
    made["assets"] |= {"data": "files"}
    made["prepare"] |= {"sources": [{"path": "examples/arithmetic.jsonl"}], "columns": ["answer"]}
    made["ppo"] |= {
        "batch_size": 4,
        "mini_batch_size": 4,
        "micro_batch_size": 4,
        "total_episodes": 8,
        "critic": "policy",
        "reward_weight": 0,
        "rewards": [*REWARDS, {"name": "far", "url": server.url}],
    }
    return check_params(made, "test")


def solve(prompt: str) -> int:
    a, b = prompt.removesuffix(" =").split(" + ")
    return int(a) + int(b)


def test_the_answers_of_the_data_reach_functions_and_servers(params, server, capsys):
    """The server fails for the first of the four responses of each update."""
    server.spoil = lambda reply: reply | {"rewards": [None, *reply["rewards"][1:]]}
    params.ppo.max_failed_rewards = 0.25
    params.ppo.critic_warmup_epochs = 0
    inputs(params, "r0")
    prepare(params, "r0")
    prompts = read_jsonl(Path("rounds/r0/prepare/data/prompts_train.jsonl"), "")
    assert len(prompts) > 250
    for row in prompts:
        assert row["columns"] == {"answer": str(solve(row["prompt"]))}

    ppo(params, "r0")
    rows = list(read_rollouts(Path("rounds/r0/ppo/rollouts")))
    assert len(rows) == 6
    reason = "1 of 4 rewards failed, ppo.rewards far: returned None, not a finite number"
    assert capsys.readouterr().out.count(reason) == 2
    assert read_json(Path("rounds/r0/ppo/metrics.json"), "")["reward_failed_share"] == 0.25
    for row in rows:
        answer = solve(row["prompt"])
        assert row["score_sum"] == pytest.approx(answer + row["length"] / 100)
        correct = row["response"].strip() == str(answer) and row["finish_reason"] == "stop"
        assert row["score_exact"] == float(correct)
    sent = [
        (prompt, answer)
        for request in server.requests
        for prompt, answer in zip(
            request["prompts"][1:], request["columns"]["answer"][1:], strict=True
        )
    ]
    assert sent == [(row["prompt"], str(solve(row["prompt"]))) for row in rows]


@pytest.mark.parametrize("algorithm", ["ppo", "best_of_n"])
def test_a_column_that_the_data_lack_is_named(params, algorithm):
    params.prepare.columns.clear()
    params.algorithm = Algorithm(algorithm)
    inputs(params, "r0")
    prepare(params, "r0")
    with pytest.raises(BadInput, match=r"ppo\.rewards exact: its function requires answer"):
        ppo(params, "r0")


def test_the_judge_adds_by_itself():
    responses = [" 23", "22", "24 or so", "", "9" * 5000]
    assert solves(["10 + 13 ="] * 5, responses) == [0, -1, -100, -100, -100]
