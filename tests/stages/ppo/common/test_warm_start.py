"""PPO that starts from the champion's policy instead of the round's SFT model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.data import rounds
from stages.ppo.__main__ import main

R1 = Path("rounds/r1/ppo")
POLICY, SFT = Path("rounds/r0/ppo/policy"), Path("rounds/r0/sft/model")
SHORT = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "total_episodes": 4,
    "save_updates": 1,
    "on_danger": "warn",
}
# a step that changes nothing, so that the saved policy is the one of the start
STILL = {"learning_rate": 1e-12, "policy_selection": "best_update", "max_kl_per_token": 1000.0}


def with_ppo(params: Params, **changes: object) -> Params:
    ppo = params.ppo.model_dump() | SHORT | STILL
    return check_params(params.model_dump() | {"rounds": rounds(2), "ppo": ppo | changes}, "test")


def crown() -> None:
    """Make r0's policy the champion of r1."""
    hashes = {str(path): file_hash(path) for path in (POLICY, SFT)}
    write_json(Path("rounds/r1/champion/champion.json"), {"round": "r0", "hashes": hashes})


@pytest.fixture
def two_rounds(make_round):
    """r1 has another SFT model; the policy of r0 has moved away from its own."""

    def make(r: int) -> Params:
        params = with_ppo(make_round("r0", 1.0), lora={"r": r, "top_layers": 1})
        shutil.rmtree("rounds/r0/ppo")
        main(with_ppo(params, learning_rate=0.05, policy_selection="target_kl"), "r0")
        make_round("r1", 1.0)
        path = Path("rounds/r1/sft/model/model.safetensors")
        weights = load_file(path)
        weights["model.norm.weight"] *= 1.1
        save_file(weights, path, {"format": "pt"})
        crown()
        return params

    return make


def read_steps() -> list[dict]:
    return [json.loads(line) for line in (R1 / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("r", [4, 0], ids=["adapters", "all weights"])
def test_the_policy_starts_as_the_champion_and_the_reference_is_sft(two_rounds, r):
    params = with_ppo(two_rounds(r), init_from="champion")
    shutil.rmtree(R1)
    main(params, "r1")
    name = "adapter_model.safetensors" if r else "model.safetensors"
    champion, started = (
        load_file(folder / name) for folder in (POLICY, R1 / "checkpoints/step_00001")
    )
    assert champion.keys() == started.keys()
    for weight, value in champion.items():
        torch.testing.assert_close(started[weight], value)
    manifest = json.loads((R1 / "manifest.json").read_text())
    assert manifest["started_from"] == str(POLICY)
    # the validation of update 0 is SFT's; the first rollout has the champion's KL from r1's SFT
    sft = json.loads((R1 / "metrics.json").read_text())["validations"][0]
    assert (sft["update"], sft["kl"]) == (0, pytest.approx(0.0, abs=1e-6))
    assert read_steps()[0]["kl"] > 0.01


@pytest.mark.parametrize("init_from", ["sft", "champion"])
def test_by_default_and_without_a_champion_the_policy_starts_as_sft(two_rounds, init_from):
    params = two_rounds(4)
    shutil.rmtree(R1)
    if init_from == "champion":
        write_json(Path("rounds/r1/champion/champion.json"), {"round": None})
    main(with_ppo(params, init_from=init_from), "r1")
    assert json.loads((R1 / "manifest.json").read_text())["started_from"] == "rounds/r1/sft/model"
    assert read_steps()[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("lora", [{"r": 0}, {"r": 2}, {"lora_alpha": 8}, {"top_layers": 2}])
def test_weights_of_another_shape_are_refused(two_rounds, lora):
    params = two_rounds(4)
    lora = {"r": 4, "top_layers": 1} | lora
    with pytest.raises(BadInput, match=r"^rounds/r0/ppo/policy: .*set ppo\.lora as it was"):
        main(with_ppo(params, init_from="champion", lora=lora), "r1")


def test_an_adapter_cannot_start_from_a_whole_model(two_rounds):
    params = two_rounds(0)
    lora = {"r": 4, "top_layers": 1}
    with pytest.raises(
        BadInput, match=r"^rounds/r0/ppo/policy: the policy cannot start from these"
    ):
        main(with_ppo(params, init_from="champion", lora=lora), "r1")


def test_a_run_from_another_champion_does_not_resume(two_rounds, capsys):
    params = with_ppo(two_rounds(4), init_from="champion")
    main(params, "r1")
    shutil.rmtree(R1)
    main(params, "r1")
    assert "resumes from here" in capsys.readouterr().out
    path = POLICY / "adapter_model.safetensors"
    save_file({name: -value for name, value in load_file(path).items()}, path, {"format": "pt"})
    crown()
    main(params, "r1")
    assert "resumes from here" not in capsys.readouterr().out
