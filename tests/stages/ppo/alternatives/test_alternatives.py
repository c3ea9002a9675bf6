"""The policy stage with each algorithm, and the stages that read its outputs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.assets.inputs import main as inputs
from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.errors import BadInput, Diverged, RondoError
from stages.lib.core.files import file_hash
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.loading import load_causal_lm
from stages.lib.lm.saving import weights_hash
from stages.ppo.__main__ import main
from stages.ppo.alternatives import run
from stages.ppo.alternatives.stage import no_gain_finding
from stages.ppo.common.policy_selection import Validation
from stages.replay.__main__ import main as replay

SECTIONS = {
    "best_of_n": {
        "n": 3,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
    },
    "dpo": {"per_device_train_batch_size": 9, "learning_rate": 0.01},
    "rloo": {"num_generations": 2},
    "grpo": {"num_generations": 2},
}
FOLDER = Path("rounds/r0/ppo")
OUTPUTS = [
    "checkpoints",
    "curves.csv",
    "health.json",
    "manifest.json",
    "metrics.json",
    "metrics.jsonl",
    "policy",
    "rollouts",
]


@pytest.mark.parametrize("algorithm", SECTIONS)
def test_a_policy_is_trained_and_the_same_seed_gives_the_same_bytes(
    make_params, second_is_best, algorithm
):
    params = make_params(algorithm, SECTIONS[algorithm], learning_rate=0.01)
    main(second_is_best(params), "r0")
    first = file_hash(FOLDER)
    assert sorted(path.name for path in FOLDER.iterdir()) == OUTPUTS
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    # of the policies after updates 0, 2 and 4 the judge likes the second best
    assert (metrics["updates"], metrics["policy_update"]) == (4, 2)
    policy, second, last = (
        (FOLDER / name / "adapter_model.safetensors").read_bytes()
        for name in ("policy", "checkpoints/step_00002", "checkpoints/step_00004")
    )
    assert policy == second != last
    assert metrics["dangers"] == 0
    assert metrics["health"] == json.loads((FOLDER / "health.json").read_text())["verdict"]
    steps = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in steps if "validation_judge_score" in row] == [2, 4]
    assert steps[-1]["validation_kl"] != 0.0
    rollouts = list(read_rollouts(FOLDER / "rollouts"))
    kept = [row for row in rollouts if row["update"] == 2]
    columns = {"id", "prompt", "response", "score", "kl", "judge_score", "finish_reason", "length"}
    assert kept and columns <= kept[-1].keys()
    shutil.rmtree(".rondo/work/r0/ppo")  # else the run would resume where it has ended
    main(second_is_best(params), "r0")
    assert file_hash(FOLDER) == first


@pytest.mark.parametrize("algorithm", ["best_of_n", "rloo"])
def test_the_last_policy_is_scaled_to_the_target_kl_evaluated_and_mined(make_params, algorithm):
    """The judge knows no word of these texts, so that no earlier policy is better."""
    ppo = {"learning_rate": 0.001, "target_kl_per_token": 0.0005}
    params = make_params(algorithm, SECTIONS[algorithm], **ppo)
    main(params, "r0")
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    assert (metrics["policy_update"], metrics["updates"]) == (4, 4)
    assert metrics["validations"][2]["kl_per_token"] > 0.001 and metrics["policy_scale"] < 1
    assert abs(metrics["validation_kl_per_token"] - 0.0005) < 1e-4
    kept, trained = (
        load_file(FOLDER / name / "adapter_model.safetensors")
        for name in ("policy", "checkpoints/step_00004")
    )
    for name, weight in trained.items():
        scale = metrics["policy_scale"] if "lora_B" in name else 1.0
        torch.testing.assert_close(kept[name], weight * scale)
    lines = (FOLDER / "metrics.jsonl").read_text().splitlines()
    for row in [metrics, *(step for step in map(json.loads, lines) if "kl" in step)]:
        sft_length = metrics["validations"][0]["length"]
        assert row["kl_per_token"] == pytest.approx(row["kl"] / sft_length)
    inputs(params, "r0")
    evaluate(params, "r0")
    evaluated = json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())
    assert evaluated["reproduced"] and evaluated["ppo"]["kl"] > 0.0
    replay(params, "r0")
    assert json.loads(Path("rounds/r0/replay/metrics.json").read_text())["badcases"] > 0


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_all_weights_can_be_trained_with_a_frozen_copy_as_reference(make_params, algorithm):
    params = make_params(algorithm, SECTIONS[algorithm], lora={"r": 0})
    main(params, "r0")
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    sft_model = load_causal_lm(Path("rounds/r0/sft/model"), params.model)
    assert manifest["reference"] == weights_hash(sft_model)
    pairs = ["annotate/data/pairs_train.jsonl"] if algorithm == "dpo" else []
    made_from = ["prepare/data/prompts_train.jsonl", "sft/manifest.json", "reward/manifest.json"]
    assert manifest["inputs"] == {
        f"rounds/r0/{path}": file_hash(Path("rounds/r0") / path) for path in pairs + made_from
    }
    assert (FOLDER / "policy/model.safetensors").exists() and (
        FOLDER / "checkpoints/step_00002/model.safetensors"
    ).exists()
    first, *_ = read_rollouts(FOLDER / "rollouts")
    assert first["kl"] == 0.0
    steps = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["validation_kl"] != 0.0


def test_a_reference_that_training_changed_is_refused(make_params, monkeypatch):
    params = make_params("best_of_n", SECTIONS["best_of_n"])
    train = run.ALGORITHMS[params.algorithm]

    def changing(context):
        callback = train(context)
        with callback.trained_policy.reference() as model, torch.no_grad():
            next(p for p in model.parameters() if not p.requires_grad).add_(1)
        return callback

    monkeypatch.setitem(run.ALGORITHMS, params.algorithm, changing)
    with pytest.raises(RondoError, match="after training, the weights of the reference"):
        main(params, "r0")


@pytest.mark.parametrize("algorithm", ["rloo", "grpo"])
def test_a_danger_stops_the_run_and_names_what_to_change(make_params, algorithm):
    params = make_params(
        algorithm, SECTIONS[algorithm], kl_patience=3, min_kl_per_token=100.0, validation_updates=2
    )
    main(params, "r0")
    metrics, health = (
        json.loads((FOLDER / f"{name}.json").read_text()) for name in ("metrics", "health")
    )
    assert (metrics["updates"], metrics["stopped"], metrics["health"]) == (
        3,
        "no movement",
        "danger",
    )
    # the policy after the danger is neither validated nor scaled
    assert [(one["update"], one["scale"]) for one in metrics["validations"]] == [(0, 1), (2, 1)]
    assert health["findings"][0]["first_fix"] == f"raise ppo.learning_rate, lower {algorithm}.beta"


def test_a_warning_if_sft_is_kept():
    [finding] = no_gain_finding(Validation(0, 1.0, (0.1,), *[0.0] * 6))
    assert (finding.sign, finding.verdict) == ("nothing gained", "warn")
    assert no_gain_finding(Validation(4, 1.0, (0.1,), 2.0, 0.1, *[0.0] * 4)) == []


@pytest.mark.parametrize(
    ("algorithm", "longer"),
    [
        ("dpo", "dpo.num_train_epochs"),
        ("rloo", "ppo.total_episodes"),
    ],
)
def test_a_target_out_of_reach_names_the_setting_that_trains_for_longer(
    make_params, capsys, algorithm, longer
):
    ppo = {"max_steps": 1, "policy_selection": "target_kl", "target_kl_per_token": 999.0}
    main(make_params(algorithm, SECTIONS[algorithm], **ppo), "r0")
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"is too far from the trained policy: raise {longer}, or lower" in last


def test_a_run_that_diverges_is_stopped(make_params):
    params = make_params("dpo", SECTIONS["dpo"] | {"learning_rate": 1e30})
    with pytest.raises(
        Diverged, match=r"dpo, step \d: .*grad_norm.* not finite\. Next: lower its learning rate"
    ):
        main(params, "r0")


def test_groups_that_do_not_divide_a_batch_are_an_error(make_params):
    with pytest.raises(
        BadInput, match=r"ppo\.batch_size 4 must be a multiple of rloo\.num_generations 3"
    ):
        make_params("rloo", {"num_generations": 3})
