"""The stage from its inputs to its outputs, in each assignment of models to the four roles."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.shared import Dtype
from stages.lib.lm.loading import load_causal_lm
from stages.lib.lm.saving import weights_hash
from stages.ppo.__main__ import main
from stages.ppo.common.episodes import hold_out_prompts

SHORT = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 2,
    "total_episodes": 12,
    "learning_rate": 5e-3,
    "save_updates": 2,
    "max_kl_per_token": 1000.0,
}


def with_ppo(params: Params, **changes: object) -> Params:
    return check_params(
        params.model_dump()
        | {"ppo": params.ppo.model_dump() | SHORT | {"on_danger": "warn"} | changes},
        "test",
    )


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        # at this rate, each response is another one after two updates
        ({"learning_rate": 2e-2}, "adapter_model.safetensors"),
        ({"lora": {"r": 0}, "critic_lora": {"r": 0}}, "model.safetensors"),
        ({"critic": "policy"}, "adapter_model.safetensors"),
    ],
    ids=["adapters", "all weights", "value head"],
)
def test_every_assignment_of_roles_is_trained_saved_and_evaluated(
    make_round, second_is_best, changes, policy
):
    params = second_is_best(with_ppo(make_round("r0", 1.0), **changes))
    folder = Path("rounds/r0/ppo")
    shutil.rmtree(folder)
    main(params, "r0")
    assert (folder / "policy" / policy).exists()
    assert (folder / "checkpoints/step_00002" / policy).exists()
    metrics = json.loads((folder / "metrics.json").read_text())
    # of the policies after updates 0, 2 and 3 the judge likes the second best
    assert (metrics["updates"], metrics["policy_update"]) == (3, 2)
    saved = [(folder / name / policy).read_bytes() for name in ("policy", "checkpoints/step_00002")]
    assert saved[0] == saved[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    sft_model = load_causal_lm(Path("rounds/r0/sft/model"), params.model)
    assert manifest["reference"] == weights_hash(sft_model)
    made_from = ("prepare/data/prompts_train.jsonl", "sft/manifest.json", "reward/manifest.json")
    assert manifest["inputs"] == {
        f"rounds/r0/{path}": file_hash(Path("rounds/r0") / path) for path in made_from
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6) and [
        row["step"] for row in rows if "validation_judge_score" in row
    ] == [2, 3]
    evaluate(params, "r0")
    evaluated = json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())
    assert evaluated["reproduced"] and evaluated["ppo"]["kl"] > 0.0


@pytest.mark.parametrize("r", [4, 0], ids=["adapters", "all weights"])
def test_the_last_policy_is_scaled_to_the_target_kl_saved_and_evaluated(make_round, r):
    params = with_ppo(
        make_round("r0", 1.0),
        lora={"r": r},
        save_updates=3,
        learning_rate=0.001,
        target_kl_per_token=0.0005,
    )
    folder = Path("rounds/r0/ppo")
    shutil.rmtree(folder)
    main(params, "r0")
    metrics = json.loads((folder / "metrics.json").read_text())
    scale, last = metrics["policy_scale"], metrics["validations"][2]
    assert last["update"] == metrics["policy_update"] == 3 and last["kl_per_token"] > 0.003
    assert scale < 1 and abs(metrics["validation_kl_per_token"] - 0.0005) < 1e-4
    name = "adapter_model.safetensors" if r else "model.safetensors"
    kept, trained = (
        load_file(folder / path / name) for path in ("policy", "checkpoints/step_00003")
    )
    sft = {} if r else load_file(Path("rounds/r0/sft/model") / name)
    for weight, value in trained.items():
        start = sft.get(weight, torch.zeros_like(value))
        expected = value if "lora_A" in weight else start + scale * (value - start)
        torch.testing.assert_close(kept[weight], expected)
    evaluate(params, "r0")
    curve = csv.DictReader(Path("rounds/r0/evaluate/curves.csv").read_text().splitlines())
    points = [(row["step"], float(row["scale"]), float(row["kl"])) for row in curve]
    assert [point[:2] for point in points] == [("0", 1.0), ("3", scale), ("3", 1.0)]
    assert 0.0 == points[0][2] < points[1][2] < points[2][2]


def test_kl_per_token_is_over_the_length_of_sfts_responses(make_round):
    params = with_ppo(
        make_round("r0", 1.0), response_length=200, learning_rate=0.1, max_kl_per_token=100
    )
    folder = Path("rounds/r0")
    shutil.rmtree(folder / "ppo")
    main(params, "r0")
    metrics = json.loads((folder / "ppo/metrics.json").read_text())
    rollouts = [json.loads(one) for one in (folder / "ppo/metrics.jsonl").read_text().splitlines()]
    sft = metrics["validations"][0]
    for row in [*rollouts, *metrics["validations"]]:
        assert row["kl_per_token"] == pytest.approx(row["kl"] / sft["length"])
    # of one policy the length can be SFT's by chance, as the last one's is on some processors
    assert any(row["length"] != sft["length"] > 0 for row in metrics["validations"])
    evaluate(params, "r0")
    evaluated = json.loads((folder / "evaluate/metrics.json").read_text())
    policies = [evaluated["ppo"], *evaluated["checkpoints"].values()]
    for row in policies:
        assert row["kl_per_token"] == pytest.approx(row["kl"] / evaluated["sft"]["length"])
    assert any(row["length"] != evaluated["sft"]["length"] for row in policies)


def test_a_clip_range_per_sequence_below_rounding_stops_the_stage_at_its_start(make_round):
    """In float32, rounding is below 1e-6; in bfloat16 far above."""
    params = with_ppo(make_round("r0", 1.0), loss_level="sequence", cliprange_sequence=1e-6)
    model = params.model.model_copy(update={"dtype": Dtype.bfloat16})
    with pytest.raises(BadInput, match=r"ppo\.cliprange_sequence 1e-06 with ppo\.loss_level"):
        main(params.model_copy(update={"model": model}), "r0")


def test_a_policy_that_moves_by_rounding_alone_is_reported(make_round):
    """In bfloat16, its KL is far above 1e-9 nats per token, but below twice what rounding gives."""
    params = with_ppo(
        make_round("r0", 1.0), learning_rate=1e-5, min_kl_per_token=1e-9, kl_patience=2
    )
    model = params.model.model_copy(update={"dtype": Dtype.bfloat16})
    shutil.rmtree("rounds/r0/ppo")
    main(params.model_copy(update={"model": model}), "r0")
    rows = [json.loads(row) for row in Path("rounds/r0/ppo/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["kl_per_token"] > 1e-9
    findings = json.loads(Path("rounds/r0/ppo/health.json").read_text())["findings"]
    assert "no movement" in [finding["sign"] for finding in findings]


def test_held_out_prompts_are_never_trained_on_even_if_replay_repeats_them():
    rows = [{"id": f"{n}{copy}", "prompt": f"Prompt {n}"} for n in range(20) for copy in "ab"]
    train, held_out = hold_out_prompts(rows, with_ppo(Params(), validation_prompts=6))
    assert len(held_out) == 6 and len(train) == 28
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)


@pytest.mark.parametrize(
    ("patience", "trained", "stopped_at", "kept", "dangers"),
    [(1, False, 1, 0, 1), (3, True, 3, 2, 1), (3, False, 3, 0, 0)],
)
def test_a_danger_in_the_rollout_of_the_kept_policy_counts_and_later_ones_do_not(
    make_round, second_is_best, patience, trained, stopped_at, kept, dangers
):
    """Update n trains on the rollout of the policy after n - 1. After a danger no policy is
    validated, so 0 or 2 is kept. An untrained policy gives SFT's responses, so it is not better.
    """
    params = with_ppo(
        make_round("r0", 1.0),
        on_danger="stop",
        min_kl_per_token=999.0,
        kl_patience=patience,
        warmup_updates=0,
        learning_rate=2e-2 if trained else 1e-9,
    )
    main(second_is_best(params) if trained else params, "r0")
    health, metrics = (
        json.loads(Path(f"rounds/r0/ppo/{name}.json").read_text()) for name in ("health", "metrics")
    )
    (danger,) = [finding for finding in health["findings"] if finding["verdict"] == "danger"]
    assert (metrics["stopped"], danger["update"], metrics["updates"]) == (
        "no movement",
        stopped_at,
        stopped_at,
    )
    assert (metrics["policy_update"], metrics["dangers"]) == (kept, dangers)
