"""Two processes that divide the layers of PPO's models come to the weights of two whole ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.paths import ROOT

LAUNCH = """
import sys
from stages.lib.core.launch import launch
sys.exit(launch("tests.stages.ppo.trainer.sharded_program", sys.argv[1:], 2))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case: what whole and what sharded models give."""
    path: Path = tmp_path_factory.mktemp("sharded") / "results.pt"
    run = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    results: dict[str, Any] = torch.load(path)
    return results


# float32: sums of other parts. bfloat16: the gradients of two processes are rounded together; how
# far that goes depends on the processor's products (1.2% of approx_kl without AVX-512)
@pytest.mark.parametrize(
    ("case", "relative", "absolute"),
    [("critic", 1e-3, 1e-5), ("value head", 1e-3, 1e-5), ("bfloat16", 1.5e-2, 3e-4)],
)
def test_sharded_models_are_trained_as_whole_ones(
    trained: dict[str, Any], case: str, relative: float, absolute: float
) -> None:
    whole, sharded = trained[case]
    assert sharded["responses"] == whole["responses"]
    assert sharded["hashes"] == whole["hashes"]
    for actual, expected in zip(sharded["metrics"], whole["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=relative, abs=1e-5)
    assert [*sharded["state"]] == [*whole["state"]] == ["policy", "critic"]
    for name, expected in whole["state"].items():
        torch.testing.assert_close(sharded["state"][name], expected, rtol=relative, atol=absolute)
    torch.testing.assert_close(sharded["selected"], whole["selected"], rtol=relative, atol=absolute)
    assert all(sharded["resumed"])


def test_each_process_holds_half_of_weights_masters_and_moments(trained: dict[str, Any]) -> None:
    """Weights outside of the layers stay whole, but their masters and moments do not."""
    first, second = trained["bfloat16"][1]["rows"]
    layer, embeddings = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"

    def rows(held: int, updated: int) -> dict[str, int]:
        return {"weight": held} | dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), updated)

    for model in (0, 1):  # policy and critic
        assert [process[model][layer] for process in (first, second)] == [
            rows(16, 16),
            rows(15, 15),
        ]
        assert [process[model][embeddings] for process in (first, second)] == [
            rows(41, 21),
            rows(41, 20),
        ]
    divided = {name for name in first[0] if first[0][name] == second[0][name] == rows(16, 16)}
    assert "model.layers.0.input_layernorm.weight" in divided
