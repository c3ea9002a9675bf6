"""What a run logs before it starts, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest

from flows.execution import needs
from flows.execution.model_shape import ModelShape
from stages.lib.core.errors import OutOfMemory, RondoError
from stages.lib.core.files import write_json
from stages.lib.core.params import Params

pytestmark = pytest.mark.usefixtures("project")  # a DVC project with a cache of copies
FULL = {"r": 0}
# 1e9 weights: four matrices of 10,000 x 10,000, and three of 10,000 x 20,000
BILLION = ModelShape(10_000, 1, 1, 1, 10_000, 20_000, 0)


def logged(waiting: set[str], **sections: Any) -> list[str]:
    lines: list[str] = []
    params = Params.model_validate(sections)
    needs.check(params, ["assets", "sft@r0", "ppo@r0"], waiting, lines.append)
    return lines


def gigabytes(waiting: set[str], **sections: Any) -> float:
    """Of disk."""
    lines: list[str] = []
    needs.check_disk(Params.model_validate(sections), waiting, BILLION, lines.append)
    return float(lines[0].split()[1])


@pytest.fixture(autouse=True)
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "free_bytes", lambda: 10**15)


def measured(address: str, ended: str, seconds: float) -> None:
    stage, _, round_ = address.partition("@")
    path = Path(".rondo/work", round_, stage, "made.json")
    first = {"ended": "2026-01-01", "seconds": 1.0}
    write_json(path, {"a": first, "b": {"ended": ended, "seconds": seconds}})


def test_the_stages_that_wait_are_logged_with_what_they_need() -> None:
    assert logged(set()) == ["to do: nothing; all 3 stages are up to date"]
    todo, memory, disk = logged({"sft@r0", "assets"})
    assert todo.startswith("to do: 2 of 3 stages of 1 round(s)")
    assert memory == "GB of memory at least, for weights, gradients and Adam's states: sft 0.3"
    assert disk == "disk: 1.3 GB of models, 1000000.0 GB free"


def test_minutes_are_those_of_the_last_time() -> None:
    measured("sft@r0", "2026-02-01", 90.0)
    measured("ppo@r7", "2026-02-01", 600.0)
    measured("ppo@r8", "2026-03-01", 660.0)
    _, minutes, *_ = logged({"sft@r0", "ppo@r0"})
    assert minutes == "minutes when they ran last: 12: sft@r0 1.5, ppo@r0 11.0"
    measured("ppo@r0", "2025-12-01", 5.0)  # older than another run of it
    assert needs.last_seconds("ppo@r0") == 1.0
    assert "not measured yet: assets" in logged({"sft@r0", "assets"})


def test_a_model_of_unknown_size_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "nobody/nothing@" + 40 * "0"
    *_, warning = logged({"sft@r0"}, assets={"model": name})
    assert warning.startswith(f"warning: the size of assets.model {name} is not known")


def test_the_memory_is_that_of_the_smallest_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi prints MiB, a line per GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert needs.device_memory()[1] is False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n[ $1 = --id=3,5 ] && printf '81559\\n100\\n'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program.chmod(0o755)
    assert needs.device_memory() == (100 * 2**20, True)
    with pytest.raises(OutOfMemory, match=r"sft needs .* a GPU of this machine has 104\.9 MB"):
        logged({"sft@r0"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert needs.device_memory() == (math.inf, True)


def test_models_are_in_their_folder_in_the_cache_and_in_mlflow() -> None:
    assert gigabytes({"assets"}) == 2 * 2
    assert gigabytes({"sft@r0"}, mlflow={"upload": ["sft"]}) == 3 * 2
    reward = {"ensemble": 3, "judge_share": 0.5}
    assert gigabytes({"reward@r0"}, reward=reward, mlflow={"upload": []}) == 2 * 4 * 2
    assert gigabytes({"sft@r0", "sft@r1", "gate_sft@r0"}, mlflow={"upload": []}) == 2 * 2 * 2


def test_a_policy_has_checkpoints_and_a_fully_trained_one_is_hundreds_of_times_larger() -> None:
    """20 checkpoints, critic, and a resume state of 14 bytes per weight of both."""
    ppo = {"total_episodes": 640, "batch_size": 32, "save_updates": 1}
    both = {"lora": FULL, "critic_lora": FULL}
    full = gigabytes({"ppo@r0"}, ppo=ppo | both)
    assert full == pytest.approx(3 * 21 * 2 + 2 * 2 + 2 * 14)
    # rank 16, inputs + outputs of 7 matrices, float32
    adapter = 16 * (4 * 20_000 + 3 * 30_000) * 4 / 1e9
    assert gigabytes({"ppo@r0"}, ppo=ppo) == pytest.approx(3 * 21 * adapter + 2 * adapter, abs=0.05)
    dpo = gigabytes({"ppo@r0"}, ppo=ppo | both, algorithm="dpo")
    assert dpo == pytest.approx(3 * 2 + 14)


def test_links_to_the_cache_and_a_server_elsewhere_take_no_disk(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://far")
    assert gigabytes({"sft@r0"}) == 2 * 2
    (project / ".dvc/config.local").write_text("[cache]\n    type = hardlink,copy\n")
    assert gigabytes({"sft@r0"}) == 2


def test_a_run_that_does_not_fit_on_the_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "free_bytes", lambda: 5 * 10**9)
    assert gigabytes({"assets"}) == 4
    message = r"1 stages to run take about 6\.0 GB of disk, and 5\.0 GB are free"
    with pytest.raises(RondoError, match=message):
        gigabytes({"sft@r0"})
