"""Data without preference pairs through every stage to the report, with a reward of one's own: what
a stage cannot train or measure has no number, and its gate does not judge.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.report import page, round_files, summary
from stages.annotate.__main__ import main as annotate
from stages.assets.__main__ import main as assets
from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.capability.__main__ import main as capability
from stages.evaluate.__main__ import main as evaluate
from stages.gate.__main__ import run_gate
from stages.gate.champion import main as champion
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.loading import load_causal_lm
from stages.lib.lm.saving import weights_hash
from stages.ppo.__main__ import main as ppo
from stages.prepare.__main__ import main as prepare
from stages.replay.__main__ import main as replay
from stages.reward.__main__ import main as reward
from stages.sft.__main__ import main as sft

GATES = ("sft", "reward", "promote")
BEFORE_PPO = (sft, annotate, reward, battery, champion)
AFTER_PPO = (evaluate, capability, replay)
SETTINGS: dict[str, Any] = {
    "assets": {"model": "tiny", "data": "files"},
    "prepare": {"sources": [{"path": "rows.jsonl"}], "max_eval_prompts": 4},
    "model": {"dtype": "float32", "threads": 1},
    "sft": {"per_device_train_batch_size": 8, "max_steps": 2, "samples_per_prompt": 1},
    "ppo": {
        "batch_size": 4,
        "mini_batch_size": 4,
        "micro_batch_size": 4,
        "max_steps": 2,
        "response_length": 8,
        "validation_prompts": 2,
        "validation_updates": 2,
        "min_kl_per_token": 0,
        "reward_weight": 0,
        "rewards": [{"name": "short", "function": "short:short", "weight": 2}],
        "critic": "policy",
    },
    "evaluate": {"bootstrap_resamples": 200},
    "replay": {"max_badcases": 4, "best_of": 2, "max_share": 1},
    "gates": {"promote": {"policy": "warn"}},  # the model is random
}
FUNCTION = "def short(prompts, responses):\n    return [-len(text) / 8 for text in responses]\n"


def params(**changes: dict[str, Any]) -> Params:
    """Settings of the test; `changes` of single keys by section."""
    changed = {name: SETTINGS.get(name, {}) | values for name, values in changes.items()}
    return check_params(SETTINGS | changed, "test")


def read(path: str) -> Any:
    return json.loads(Path("rounds", path).read_text())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_processes: None) -> Path:
    """Demonstrations alone, and a reward function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    meals, places = ("rice", "soup", "fish", "bread", "cake"), ("Rome", "Oslo", "Kiel", "Bern")
    rows = [
        {"prompt": f"I ate {meal} in {place}, and", "completion": f" the {meal} was nice."}
        for meal, place in product(meals, places)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("short.py").write_text(FUNCTION)
    return tmp_path


def run_round(settings: Params, round_: str) -> None:
    """The stages of a round after prepare, with their gates."""
    Path("params.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    for stage in BEFORE_PPO:
        stage(settings, round_)
    for gate in ("sft", "reward"):
        run_gate(settings, gate, round_)
    for stage in (ppo, *AFTER_PPO):
        stage(settings, round_)
    run_gate(settings, "promote", round_)


def reports(rounds: list[str]) -> tuple[str, str]:
    """What `rondo run` prints and writes at its end."""
    stages = (*round_files.STAGES, *(f"gate_{gate}" for gate in GATES))
    locks: Any = {f"{stage}@{name}": {} for stage in stages for name in rounds}
    return summary.markdown(rounds, locks), page.render(rounds, locks)


def check_no_reward_model(round_: str) -> None:
    """No number of a reward model anywhere, and a policy that was trained by the function."""
    for stage in ("reward", "battery"):
        metrics = read(f"{round_}/{stage}/metrics.json")
        numbers = [value for value in metrics.values() if not isinstance(value, str)]
        assert metrics["not_measured"] and not any(numbers)
    for row in read_rollouts(Path("rounds", round_, "ppo/rollouts")):
        # the score is the only reward with its weight
        assert row["score_short"] == pytest.approx(-len(row["response"]) / 8, abs=1e-4)
        assert row["score"] == pytest.approx(2 * row["score_short"], abs=1e-3)
    results = read(f"{round_}/evaluate/metrics.json")
    assert "score" not in results["ppo"] and results["overoptimisation"]["proxy_after_peak"] is None
    assert 0 <= results["win_rate"] <= 1 and results["ppo"]["kl"] >= 0
    cases = read_jsonl(Path("rounds", round_, "replay/data/badcases.jsonl"))
    assert cases and all(case["score"] is None for case in cases)
    gate = json.loads(Path("reports", round_, "gate_reward.json").read_text())
    assert gate["may_continue"] and gate["not_judged"] == "not trained: there are no pairs"
    assert {check["value"] for check in gate["checks"]} == {None}


def test_demonstrations_without_pairs(project: Path) -> None:
    settings = params(gates={"sft": {"policy": "warn"}})
    inputs(settings, "r0")
    assets(settings, "r0")
    for round_ in ("r0", "r1"):
        prepare(settings, round_)
        data = Path("rounds", round_, "prepare/data")
        assert (data / "pairs_train.jsonl").read_text() == ""  # r0's badcases give none to r1
        assert (data / "pairs_eval.jsonl").read_text() == ""
        run_round(settings, round_)
        check_no_reward_model(round_)
        # what needs no pairs is measured and judged as ever
        assert read(f"{round_}/evaluate/metrics.json")["human_nll_rise"] is not None
        assert "not_judged" not in json.loads(Path(f"reports/{round_}/gate_sft.json").read_text())
    assert read("r1/replay/metrics.json")["retested"] > 0
    text, html = reports(["r0", "r1"])
    for shown in (text, html):
        assert "reward gate: not judged (not trained: there are no pairs)" in shown
    assert "all gates passed" not in text


def test_prompts_alone(project: Path) -> None:
    rows = read_jsonl(Path("rows.jsonl"))
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{row["prompt"]}"}}\n' for row in rows))
    settings = params(evaluate={"judges": ["lexicon"]})
    inputs(settings, "r0")
    assets(settings, "r0")
    prepare(settings, "r0")
    run_round(settings, "r0")
    check_no_reward_model("r0")
    metrics, reason = read("r0/sft/metrics.json"), "not trained: there are no demonstrations"
    assert metrics == {
        "not_measured": f"{reason}, so the SFT model is assets/model",
        "train_rows": 0,
    }
    base, trained = (
        weights_hash(load_causal_lm(Path(folder), settings.model))
        for folder in ("assets/model", "rounds/r0/sft/model")
    )
    assert trained == base
    results = read("r0/evaluate/metrics.json")
    assert results["human_nll_rise"] is None and "ppl_human" not in results["sft"]
    text, html = reports(["r0"])
    for shown in (text, html):
        assert f"sft gate: not judged ({reason}" in shown.replace("Sft gate", "sft gate")
    # settings that need a model, after stages that do not read them
    with pytest.raises(BadInput, match=r"set ppo.critic to policy$"):
        ppo(params(ppo=SETTINGS["ppo"] | {"critic": "reward"}), "r0")
    with pytest.raises(BadInput, match=r"there are no demonstrations.*without fluency"):
        evaluate(params(), "r0")


def test_no_pairs_where_a_reward_model_is_needed(project: Path) -> None:
    """Each setting that needs one is named, and nothing else."""
    settings = params()
    inputs(settings, "r0")
    assets(settings, "r0")
    message = {
        "ppo.reward_weight to 0 (it is 1)": {"reward_weight": 1},
        "ppo.critic to policy": {"critic": "reward"},
        "ppo.rewards to a reward of your own (docs/ppo.md)": {"rewards": []},
    }
    for setting, changes in message.items():
        with pytest.raises(BadInput) as error:
            prepare(params(ppo=changes), "r0")
        assert str(error.value).startswith("there are no preference pairs")
        assert str(error.value).endswith(
            f"add pairs (docs/data.md), or do without a reward model: set {setting}"
        )
