"""The policy stage if `ppo.model` names a policy: none is trained. Its outputs are those of PPO, so
that evaluation, gate, replay and the next round work on it.
"""

from pathlib import Path
from typing import Any

from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, stage_dir
from stages.lib.core.hub import model_folder
from stages.lib.core.params import Params
from stages.lib.core.params.shared import ModelParams
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.lm.loading import check_same_tokens
from stages.lib.lm.lora import adapter_config, adapter_weights, is_adapter
from stages.ppo.alternatives.stage import (
    PolicyRun,
    finish,
    load_models,
    load_prompts,
    prompts_path,
)
from stages.ppo.common.health import KL_KEY
from stages.ppo.common.outputs import describe_rows
from stages.ppo.common.reference import load_weights, shapes
from stages.ppo.common.resume import run_identity
from stages.ppo.common.run import open_run


def main(params: Params, round_: str) -> None:
    # 1. inputs: SFT model, rewards, prompts, and the policy
    assert params.ppo.model
    folder = model_folder(params.ppo.model, "ppo.model")
    check_unchanged("policy", params)
    prompts = load_prompts(params, round_)
    check_same_tokens(folder, prompts.tokenizer, "ppo.model", "set sft.model to its SFT model")
    models = [stage_dir(round_, stage) / "model" for stage in ("sft", "reward")]
    resume, _, recorder = open_run(round_, run_identity(params, [prompts_path(round_), *models]))
    context = load_models(params, round_, prompts, resume, recorder, model=params.model)

    # 2. SFT, then the policy, validated on the held-out prompts; it is kept as it is
    run = PolicyRun(context, KL_KEY)
    run.begin(as_before_training(context.sft, folder))
    take(run.trained_policy.policy, folder, params.model)
    run.updates, kept = 1, run.selector.validate(1)
    if not kept.kl:
        raise BadInput(f"ppo.model {folder}: it is the SFT model (KL 0): name the trained policy")
    run.selector.best = kept

    # 3. its rollouts, and the outputs of PPO
    metrics = describe_rows(run.sample_rows(1), run.selector.first.length) | kept.metrics
    recorder.log(1, metrics, ["score_mean", "kl"])
    finish(run, round_, kept, name=params.ppo.model, manifest={"policy": file_hash(folder)})


def as_before_training(sft: Any, folder: Path) -> Any:
    """The SFT model; with the policy's kind of adapter, which changes nothing yet, if it is one.

    Raises:
        BadInput: it is an adapter of another model.
    """
    if not is_adapter(folder):
        return sft
    config = adapter_config(folder)
    config.inference_mode = False
    try:
        return get_peft_model(sft, config)
    except ValueError as error:
        raise another_model(folder, error) from error


def take(policy: Any, folder: Path, params: ModelParams) -> None:
    """Give the policy its weights.

    Raises:
        BadInput: they are those of another model.
    """
    try:
        if not is_adapter(folder):
            return load_weights(policy, folder, params)
        weights = adapter_weights(folder)
        if shapes(weights) != shapes(get_peft_model_state_dict(policy)):
            raise KeyError("its adapter has other layers or shapes")
        set_peft_model_state_dict(policy, weights)
    except (KeyError, RuntimeError) as error:
        raise another_model(folder, error) from error


def another_model(folder: Path, error: Exception) -> BadInput:
    return BadInput(
        f"ppo.model {folder}: it was not trained from this round's SFT model ({error}). Next: set "
        "sft.model to the model that it was trained from"
    )
