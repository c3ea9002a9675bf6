"""Degenerate numbers: what a policy and the gates make of NaN, infinity, responses that are empty
or never end, and another vocabulary.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.gate.thresholds import GATE_STAGES
from stages.gate.verdict import evaluate_gate
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.responses import Response
from stages.lib.lm.scoring import RewardScorer
from stages.lib.thresholds import THRESHOLDS
from stages.ppo.trainer.roles import Roles, load_roles
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.conftest import (  # noqa: F401 - fixtures
    always,
    made_rounds,
    make_round,
    tiny_folder,
)
from tests.stages.ppo.conftest import make_roles  # noqa: F401 - fixture

EOS, WORD = 2, 7
LENGTH = 6
SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "mini_batch_size": 8,
    "micro_batch_size": 4,
    "total_episodes": 120,
    "response_length": LENGTH,
    "num_ppo_epochs": 1,
}
PROMPTS = [({"id": f"p{i}", "prompt": f"{i}:"}, [5 + i, 6]) for i in range(8)]
RESPONSES = {
    "all EOS": lambda i: [EOS],
    "no EOS": lambda i: [WORD + i % 3] * LENGTH,
    "one token for all": lambda i: [WORD] * (LENGTH - 1) + [EOS],
    "one never ends": lambda i: [EOS] if i else [WORD] * LENGTH,
}


class FixedResponses(Roles):
    """In place of sampling: responses of one kind."""

    respond: Callable[[int], list[int]]

    def sample(self, prompt_ids: Any, *_: Any) -> list[Response]:
        tokens = map(self.respond, range(len(prompt_ids)))
        return [
            Response(prompt, response, "", ended=EOS in response)
            for prompt, response in zip(prompt_ids, tokens, strict=True)
        ]


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("kind", RESPONSES)
def test_updates_on_degenerate_responses_are_finite(
    make_roles: Any,  # noqa: F811
    kind: str,
    value_head: bool,
) -> None:
    roles = make_roles(FixedResponses, lora=LoraParams(r=4), value_head=value_head)
    roles.respond = RESPONSES[kind]
    trainer = PpoTrainer(roles, PROMPTS, PpoParams(**SETTINGS), seed=0)
    for _ in range(3):
        rollout, metrics = trainer.step()
        assert len(rollout.rows) == SETTINGS["batch_size"]  # no episode was left out
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        assert not bad
    assert all(torch.isfinite(p).all() for p in trainer.roles.policy.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.5", True, [], {}])
@pytest.mark.parametrize("gate", sorted(THRESHOLDS))
def test_no_gate_passes_without_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str, value: Any
) -> None:
    """Each metric of each gate; null alone may mean `not measured`, if the threshold says so."""
    monkeypatch.chdir(tmp_path)
    for threshold in THRESHOLDS[gate]:
        for stage in GATE_STAGES[gate]:
            write_json(Path(f"rounds/r0/{stage}/metrics.json"), {})
        name = threshold.metric.split(" - ")[0]
        stage, *keys = name.split(".")
        metrics: Any = value
        for key in reversed(keys):
            metrics = {key: metrics}
        write_json(Path(f"rounds/r0/{stage}/metrics.json"), metrics)
        verdict = evaluate_gate(check_params({}, "test"), gate, "r0")
        rows = [row for row in verdict["checks"] if row["metric"] == threshold.metric]
        optional = [t.optional for t in THRESHOLDS[gate] if t.metric == threshold.metric]
        assert [row["passed"] for row in rows] == [value is None and may for may in optional], rows
        assert not verdict["passed"]
        json.dumps(verdict, allow_nan=False)


def test_a_reward_model_with_another_vocabulary(
    make_round: Callable[[str, float], Params],  # noqa: F811
) -> None:
    """PPO, and all that score by its texts, name both models; nothing is scored."""
    params = make_round("r0", 1.0)
    folder = Path("rounds/r0/reward/model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
    message = r"reward/model: config\.json's vocab_size is 9, but the tokenizer of .* has \d+ tok"
    with pytest.raises(BadInput, match=message):
        load_roles(params, Path("rounds/r0/sft/model"), folder)
    with pytest.raises(BadInput, match=message):
        RewardScorer(folder, params)
