"""The policy against the champion at equal KL: one of the two is scaled towards its SFT model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.evaluate.__main__ import main
from stages.lib.core.files import file_hash, write_json
from stages.lib.core.params import Params, check_params


def scale_b(policy: Path, factor: float) -> None:
    path = policy / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({n: w * factor if "lora_B" in n else w for n, w in weights.items()}, path)


@pytest.fixture
def evaluate_rounds(
    make_round: Callable[[str, float], Params],
    adapter_and_whole: Callable[[str, Callable[[], Any]], tuple[Any, Any]],
) -> Callable[..., dict[str, Any]]:
    """Evaluate r1, whose champion is r0's policy, with B of their adapters scaled."""

    def run(
        r0: float, r1: float, whole: bool = False, other: bool = False, anchor: str = "sft/model"
    ) -> dict[str, Any]:
        make_round("r0", 1.0)
        params = make_round("r1", 1.0)
        if other:
            policy = Path("rounds/r0/ppo/policy")
            shutil.copytree(policy.parent / "checkpoints/step_00002", policy, dirs_exist_ok=True)
        for round_, factor in (("r0", r0), ("r1", r1)):
            scale_b(Path("rounds") / round_ / "ppo/policy", factor)
            if whole:
                adapter_and_whole(round_, lambda: None)
        paths = [Path("rounds/r0/ppo/policy"), Path("rounds/r0/sft/model")]
        champion = {"round": "r0", "hashes": {str(path): file_hash(path) for path in paths}}
        anchor_path = Path("rounds/r0") / anchor
        champion["anchor"] = {str(anchor_path): file_hash(anchor_path)}
        write_json(Path("rounds/r1/champion/champion.json"), champion)
        shutil.rmtree("rounds/r1/ppo/checkpoints")
        values = params.model_dump()
        values["evaluate"] |= {"judges": ["fluency"], "tie_margin": 0.0, "samples_per_prompt": 8}
        main(check_params(values, "test"), "r1")
        return json.loads(Path("rounds/r1/evaluate/metrics.json").read_text())

    return run


@pytest.mark.parametrize(
    ("r0", "r1", "scaled", "whole"),
    [(0.1, 0.2, "ppo", False), (0.2, 0.1, "champion", True)],
    ids=["adapters", "all weights"],
)
def test_the_one_with_more_kl_is_scaled_until_both_have_as_much(
    evaluate_rounds, r0, r1, scaled, whole
):
    metrics = evaluate_rounds(r0, r1, whole, other=True)
    kls = {name: metrics[name]["kl_anchor"] for name in ("ppo", "champion", "equal_kl")}
    near, far = sorted((kls["ppo"], kls["champion"]))
    assert far > 2 * near and kls[scaled] == far
    assert kls["equal_kl"] == pytest.approx(near, rel=0.1)
    assert metrics["equal_kl_scaled"] == scaled
    assert metrics["equal_kl_scale"] == pytest.approx(0.5, rel=0.1)

    a, b = {"ppo": ("equal_kl", "champion"), "champion": ("ppo", "equal_kl")}[scaled]
    lines = Path("rounds/r1/evaluate/samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    scores = [(row[f"{a}_judge_score"], row[f"{b}_judge_score"]) for row in rows]
    wins = sum(1.0 if x > y else 0.5 if x == y else 0.0 for x, y in scores) / len(scores)
    assert metrics["win_rate_champion_equal_kl"] == pytest.approx(wins) != 0.5
    low, high = (metrics[f"win_rate_champion_equal_kl_{end}"] for end in ("low", "high"))
    assert low <= wins <= high


def test_kl_is_that_from_the_anchor(evaluate_rounds):
    """The champion has more KL from its SFT model, but it is the anchor itself."""
    metrics = evaluate_rounds(0.2, 0.1, whole=True, anchor="ppo/policy")
    assert metrics["champion"]["kl"] > metrics["ppo"]["kl"] > 0
    assert metrics["equal_kl_scaled"] == "ppo" and metrics["equal_kl_scale"] < 1


def test_policies_with_as_much_kl_are_compared_as_they_are(evaluate_rounds):
    metrics = evaluate_rounds(0.2, 0.2)
    assert metrics["ppo"]["kl_anchor"] == metrics["champion"]["kl_anchor"] > 0
    assert "equal_kl" not in metrics and metrics["equal_kl_scale"] == 1.0
    for end in ("", "_low", "_high"):
        assert metrics[f"win_rate_champion_equal_kl{end}"] == metrics[f"win_rate_champion{end}"]


def test_a_copy_of_the_champion_gains_nothing(evaluate_rounds):
    metrics = evaluate_rounds(0.2, 0.2)
    paths = [
        Path("rounds") / name / "ppo/policy/adapter_model.safetensors" for name in ("r0", "r1")
    ]
    torch.testing.assert_close(*map(load_file, paths))
    ends = [metrics[f"win_rate_champion{end}"] for end in ("", "_low", "_high")]
    assert ends == [0.5, 0.5, 0.5]
