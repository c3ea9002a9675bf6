"""A checkpoint of a tiny round, evaluated outside the DAG; a name that does not exist."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from stages.evaluate.checkpoint import main
from stages.lib.core.errors import BadInput
from tests.tokenizers import add_token


def test_a_checkpoint_against_sft_and_the_policy(make_round):
    params = make_round("r0", 1.0)
    before = sorted(Path("rounds").rglob("*"))
    other, same = (
        json.loads(main(params, "r0", name).read_text())
        for name in ("step_00002", "rounds/r0/ppo/checkpoints/step_00004")
    )
    # step 4 has the policy's weights
    policy = {key: value for key, value in same["ppo"].items() if key != "ppl_human"}
    assert same["checkpoint"] == policy != other["checkpoint"]
    assert same["ppo"] == other["ppo"] and same["win_rate_ppo"] == 0.5
    assert (same["win_rate_ppo_low"], same["win_rate_ppo_high"]) == (0.5, 0.5)
    assert same["path"] == "rounds/r0/ppo/checkpoints/step_00004" and same["hash"] != other["hash"]
    assert same["evaluation_id"] == other["evaluation_id"]
    [rows] = Path("reports/r0").glob("checkpoint_step_00002_*.jsonl")
    assert {"sft", "ppo", "checkpoint"} <= json.loads(rows.read_text().splitlines()[0]).keys()
    assert sorted(Path("rounds").rglob("*")) == before  # no stage's files were touched


def test_a_whole_model_that_others_trained(make_round):
    params = make_round("r0", 1.0)
    sft = AutoModelForCausalLM.from_pretrained("rounds/r0/sft/model", dtype=torch.float32)
    PeftModel.from_pretrained(sft, "rounds/r0/ppo/policy").merge_and_unload().save_pretrained(
        "mine"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"rounds/r0/sft/model/{name}", "mine")
    report = json.loads(main(params, "r0", "mine").read_text())
    assert report["checkpoint"]["kl"] == pytest.approx(report["ppo"]["kl"], rel=1e-3)
    add_token(Path("mine"))
    with pytest.raises(BadInput, match="--checkpoint mine: its tokens are not those of"):
        main(params, "r0", "mine")


def test_a_checkpoint_that_does_not_exist(make_round):
    params = make_round("r0", 1.0)
    message = (
        r"--checkpoint last: no model there; "
        r"rounds/r0/ppo/checkpoints has step_00002, step_00004; or give"
    )
    with pytest.raises(BadInput, match=message):
        main(params, "r0", "last")
