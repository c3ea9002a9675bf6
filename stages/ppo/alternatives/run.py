"""The policy stage with DPO or best-of-n, top to bottom; its outputs are those of PPO."""

from collections.abc import Callable

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm
from stages.lib.lm.loading import training_model_params
from stages.ppo.alternatives import best_of_n, dpo
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.stage import (
    TrainingContext,
    data_paths,
    finish,
    load_models,
    load_prompts,
)
from stages.ppo.common.reference import check_reference_weights
from stages.ppo.common.resume import run_identity
from stages.ppo.common.run import open_run

ALGORITHMS: dict[Algorithm, Callable[[TrainingContext], PolicyCallback]] = {
    Algorithm.dpo: dpo.train,
    Algorithm.best_of_n: best_of_n.train,
}


def main(params: Params, round_: str) -> None:
    # 1. inputs: SFT model, rewards, and prompts, of which some are held out
    context = load(params, round_)

    # 2. train; a killed run with the same inputs resumes
    callback = ALGORITHMS[params.algorithm](context)
    with callback.trained_policy.reference() as model:
        check_reference_weights(model, context.reference, "after training")

    # 3. the selected policy, and the outputs of PPO; the critic is a placeholder
    name = params.algorithm.value
    finish(callback, round_, callback.select(), name=name, longer=f"{name}.num_train_epochs")


def load(params: Params, round_: str) -> TrainingContext:
    """Load the models and prompts of a round, and the state of a killed run with the same inputs.

    Raises:
        BadInput: as `load_prompts`.
    """
    prompts = load_prompts(params, round_)
    models = [stage_dir(round_, stage) / "model" for stage in ("sft", "reward")]
    inputs = [*data_paths(params, round_), *models]
    resume, saved, recorder = open_run(round_, run_identity(params, inputs))
    model = training_model_params(params.model, params.ppo.lora)
    return load_models(params, round_, prompts, resume, recorder, model=model, saved=saved)
