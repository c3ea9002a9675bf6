from pathlib import Path
from typing import Any

import pytest

from flows.execution import disk, estimate
from stages.lib.core.errors import RondoError
from stages.lib.core.params import Params

FULL = {"r": 0}
pytestmark = pytest.mark.usefixtures("project")  # a DVC project with a cache of copies


def model_bytes(**sections: Any) -> dict[str, float]:
    """Of a base with 7e9 weights in 32 layers, so 4270 wide; PPO writes 20 checkpoints."""
    return disk.model_bytes(Params.model_validate(sections), 7e9, 2, 32, 20)


def test_models_are_in_their_folder_in_the_cache_and_in_mlflow() -> None:
    by_stage = model_bytes(reward={"ensemble": 3}, mlflow={"upload": ["sft"]})
    assert by_stage["assets"] == 2 * 14e9
    assert by_stage["sft"] == 3 * 14e9
    assert by_stage["reward"] == 2 * 3 * 14e9
    with_judge = model_bytes(reward={"judge_share": 0.5}, mlflow={"upload": ["reward"]})
    assert with_judge["reward"] == 3 * 2 * 14e9


def test_a_fully_trained_policy_takes_hundreds_of_times_an_adapter() -> None:
    """Weights, 20 checkpoints, critic, and a resume state of 14 bytes per weight of both."""
    full = model_bytes(ppo={"lora": FULL, "critic_lora": FULL})["ppo"]
    assert full == pytest.approx(3 * 21 * 14e9 + 2 * 14e9 + 2 * 14 * 7e9)
    adapter = 24 * 16 * (7e9 / 12 / 32) ** 0.5 * 32 * 4
    layers = {"lora": {"top_layers": None}, "critic_lora": {"top_layers": 8}}
    assert model_bytes(ppo=layers)["ppo"] == pytest.approx(3 * 21 * adapter + 2 * adapter / 4)
    policy_only = model_bytes(ppo=layers, mlflow={"upload": ["policy"]}, algorithm="dpo")["ppo"]
    assert policy_only == pytest.approx((2 * 21 + 1) * adapter)


def test_links_to_the_cache_and_a_server_elsewhere_take_no_disk(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_bytes()["sft"] == 3 * 14e9
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://far")
    assert model_bytes()["sft"] == 2 * 14e9
    (project / ".dvc/config.local").write_text("[cache]\n    type = hardlink,copy\n")
    assert model_bytes()["sft"] == 14e9


def test_a_run_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the defaults have 135e6 weights in bfloat16: 270 MB, three times."""
    monkeypatch.setattr(disk, "free_bytes", lambda: 1_600_000_000)

    def check(waiting: set[str]) -> None:
        estimate.check_disk(estimate.disk_bytes(Params(), waiting), waiting)

    check({"sft@r0", "gate_sft@r0"})
    message = r"2 stages to run take about 1\.6 GB of disk, and 1\.6 GB are free"
    with pytest.raises(RondoError, match=message):
        check({"sft@r0", "reward@r0"})
    check(set())
