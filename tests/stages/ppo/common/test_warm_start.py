"""PPO that starts from the champion's policy instead of the round's SFT model."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.assets.inputs import main as inputs
from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, read_json, write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.data import rounds
from stages.lib.lm.loading import load_causal_lm, load_policy
from stages.lib.lm.saving import saved_weights_hash
from stages.ppo.__main__ import main
from stages.ppo.trainer.update import PpoTrainer

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


def write_start() -> None:
    """Let r1 start from r0's policy."""
    hashes = {str(path): file_hash(path) for path in (POLICY, SFT)}
    write_json(Path("rounds/r1/champion/start.json"), {"round": "r0", "hashes": hashes})


@pytest.fixture(scope="module")
def made() -> dict[int, tuple[Params, Path]]:
    """By the rank of the adapters: the two rounds that a test has made for the others."""
    return {}


@pytest.fixture
def two_rounds(make_round, made, tmp_path_factory):
    """r1 has another SFT model; the policy of r0 has moved away from its own."""

    def make(r: int) -> Params:
        if r in made:
            params, folder = made[r]
            shutil.copytree(folder, "rounds")
            return params
        params = with_ppo(make_round("r0", 1.0), lora={"r": r, "top_layers": 1})
        shutil.rmtree("rounds/r0/ppo")
        main(with_ppo(params, learning_rate=0.05, policy_selection="target_kl"), "r0")
        make_round("r1", 1.0)
        path = Path("rounds/r1/sft/model/model.safetensors")
        weights = load_file(path)
        weights["model.norm.weight"] *= 1.1
        save_file(weights, path, {"format": "pt"})
        manifest = path.parents[1] / "manifest.json"
        of_sft = {"weights": saved_weights_hash(path.parent)}
        write_json(manifest, read_json(manifest, "") | of_sft)
        write_start()
        made[r] = params, shutil.copytree("rounds", tmp_path_factory.mktemp("made") / "rounds")
        return params

    return make


def read_steps() -> list[dict]:
    return [json.loads(line) for line in (R1 / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("r", [4, 0], ids=["adapters", "all weights"])
def test_the_policy_starts_as_the_champion_and_the_reference_is_sft(two_rounds, r):
    params = two_rounds(r)
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
    assert manifest["inputs"][str(POLICY)] == file_hash(POLICY)
    # first SFT is validated, then the champion; the first rollout has its KL from r1's SFT
    sft, start, _ = json.loads((R1 / "metrics.json").read_text())["validations"]
    assert (sft["update"], sft["kl"]) == (0, pytest.approx(0.0, abs=1e-6))
    assert start["update"] == 0 and start["kl"] > 0.01 < read_steps()[0]["kl"]
    assert read_steps()[0]["kl_per_token"] == pytest.approx(read_steps()[0]["kl"] / sft["length"])


def test_the_champion_is_kept_if_training_makes_it_worse(two_rounds, second_is_best):
    params = with_ppo(two_rounds(4), learning_rate=0.05, total_episodes=8, validation_updates=1)
    params = second_is_best(params)  # the first after SFT
    shutil.rmtree(R1)
    main(params, "r1")
    kept, trained = (
        load_file(R1 / name / "adapter_model.safetensors")
        for name in ("policy", "checkpoints/step_00002")
    )
    champion = load_file(POLICY / "adapter_model.safetensors")
    metrics = json.loads((R1 / "metrics.json").read_text())
    assert (metrics["policy_update"], metrics["policy_scale"]) == (0, 1.0)
    assert all(torch.equal(kept[name], value) for name, value in champion.items())
    assert not all(torch.equal(trained[name], value) for name, value in champion.items())
    # evaluation does not take update 0 for SFT
    shutil.copy("rounds/r0/prepare/manifest.json", "rounds/r1/prepare")
    evaluate(params, "r1")
    curve = csv.DictReader(Path("rounds/r1/evaluate/curves.csv").read_text().splitlines())
    points = [(row["step"], float(row["kl"]) > 0) for row in curve]
    assert points[:2] == [("0", False), ("0", True)]


def test_sft_is_kept_if_champion_and_training_are_worse(two_rounds, monkeypatch, tmp_path):
    """The judge scores SFT's validation, which is the first, above all others."""
    params = two_rounds(4)
    Path("first_wins.py").write_text(
        "calls = []\n"
        "def score(prompts, responses):\n"
        "    calls.append(prompts)\n"
        "    return [float(len(calls) == 1)] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = params.model_dump() | {"evaluate": {"judges": ["first_wins:score"]}}
    params = with_ppo(check_params(values, "test"), learning_rate=0.05, validation_updates=1)
    inputs(params, "r1")
    shutil.rmtree(R1)
    main(params, "r1")
    metrics = json.loads((R1 / "metrics.json").read_text())
    assert (metrics["policy_update"], metrics["validation_kl"]) == (0, pytest.approx(0, abs=1e-6))
    assert [validation["judge_score"] for validation in metrics["validations"]] == [1, 0, 0]
    kept = load_policy(Path("rounds/r1/sft/model"), R1 / "policy", params.model)
    sft = load_causal_lm(Path("rounds/r1/sft/model"), params.model)
    ids = torch.tensor([[5, 6, 7]], device=sft.device)
    torch.testing.assert_close(kept(ids).logits, sft(ids).logits)


def test_a_killed_run_ends_with_the_same_bytes(two_rounds, monkeypatch):
    params = with_ppo(two_rounds(4), learning_rate=0.05, total_episodes=12)
    main(params, "r1")
    expected = (R1 / "policy/adapter_model.safetensors").read_bytes()
    shutil.rmtree(R1)
    shutil.rmtree(".rondo")
    step = PpoTrainer.step

    def killed(trainer: PpoTrainer) -> object:
        if trainer.updates == 2:
            raise KeyboardInterrupt
        return step(trainer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PpoTrainer, "step", killed)
        main(params, "r1")
    main(params, "r1")
    assert (R1 / "policy/adapter_model.safetensors").read_bytes() == expected


def test_without_a_champion_the_policy_starts_as_sft(two_rounds):
    params = two_rounds(4)
    shutil.rmtree(R1)
    write_json(Path("rounds/r1/champion/start.json"), {"round": None})
    main(params, "r1")
    assert json.loads((R1 / "manifest.json").read_text())["started_from"] == "rounds/r1/sft/model"
    assert read_steps()[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    validations = json.loads((R1 / "metrics.json").read_text())["validations"]
    assert [validation["update"] for validation in validations] == [0, 1]


@pytest.mark.parametrize("lora", [{"r": 0}, {"r": 2}, {"lora_alpha": 8}, {"top_layers": 2}])
def test_weights_of_another_shape_are_refused(two_rounds, lora):
    params = two_rounds(4)
    lora = {"r": 4, "top_layers": 1} | lora
    with pytest.raises(BadInput, match=r"^rounds/r0/ppo/policy: .*set ppo\.lora as it was"):
        main(with_ppo(params, lora=lora), "r1")


def test_an_adapter_cannot_start_from_a_whole_model(two_rounds):
    params = two_rounds(0)
    lora = {"r": 4, "top_layers": 1}
    with pytest.raises(
        BadInput, match=r"^rounds/r0/ppo/policy: the policy cannot start from these"
    ):
        main(with_ppo(params, lora=lora), "r1")


def test_a_run_from_another_champion_does_not_resume(two_rounds, capsys):
    params = two_rounds(4)
    main(params, "r1")
    shutil.rmtree(R1)
    main(params, "r1")
    assert "resumes from here" in capsys.readouterr().out
    path = POLICY / "adapter_model.safetensors"
    save_file({name: -value for name, value in load_file(path).items()}, path, {"format": "pt"})
    write_start()
    main(params, "r1")
    assert "resumes from here" not in capsys.readouterr().out
