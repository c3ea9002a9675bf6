"""NeMo RL's own config, checkpoints, prompts and formulas, against Rondo's. NEMO_RL names a
checkout; the tests run in an environment that has Hydra and Ray (`make test-engines`).
"""

import __future__

import ast
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from stages.lib.core.files import read_json, stage_dir
from stages.lib.core.params import Params, check_params
from stages.lib.lm.end_tokens import saved_end_tokens
from stages.lib.lm.loading import load_tokenizer
from stages.ppo.alternatives.stage import load_prompts
from stages.ppo.engines import rondo_check
from stages.ppo.engines.nemo_rl import METRICS, REWARD_MODEL, NemoRlJob
from stages.ppo.trainer import functional
from tests import engine_settings

CHECKOUT = os.environ.get("NEMO_RL", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="needs NeMo RL: make test-engines clones it")
GAMMA, LAM, CLIP, KL_COEF = 0.97, 0.9, 0.2, 0.3
# of each file: what the tests call
CODE = {
    "algorithms/utils.py": ["calculate_kl", "masked_mean", "masked_var"],
    "algorithms/advantage_estimator.py": ["GeneralizedAdvantageEstimator"],
    "algorithms/loss/loss_functions.py": ["ClippedPGLossFn", "MseValueLossFn"],
    "algorithms/grpo.py": ["scale_rewards"],
    "utils/logger.py": ["get_next_experiment_dir"],
}


@pytest.fixture(autouse=True)
def nemo_rl(monkeypatch) -> Path:
    """NeMo RL's files, of which those can be imported that need no GPU."""
    monkeypatch.syspath_prepend(CHECKOUT)
    monkeypatch.setitem(sys.modules, "soundfile", ModuleType("soundfile"))  # of other data
    return Path(CHECKOUT)


@pytest.fixture(scope="module")
def code() -> SimpleNamespace:
    """Functions and classes by name; their files import what needs GPUs, which is left out."""
    folder, known = Path(CHECKOUT) / "nemo_rl", []
    for path, names in CODE.items():
        tree = ast.parse((folder / path).read_text())
        definitions = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef))
        called = [node for node in definitions if node.name in names]
        assert len(called) == len(names), path
        known += called
    kinds = SimpleNamespace(LOGPROB=0, LOGIT=1, TOKEN_LEVEL=2, SEQUENCE_LEVEL=3)
    space: dict[str, Any] = {
        **{"torch": torch, "os": os, "re": re, "LossFunction": object},
        **{"LossInputType": kinds, "LossType": kinds, "glob": __import__("glob")},
        "get_gdpo_reward_component_keys": lambda _: [],
    }
    tree = ast.fix_missing_locations(ast.Module(known, []))
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, CHECKOUT, "exec", flags=flags), space)
    return SimpleNamespace(**space)


@pytest.fixture
def job(make_round) -> Callable[..., NemoRlJob]:
    """A job of a round whose SFT and reward models are there."""
    params = make_round("r0", 1.0).model_dump(mode="json")

    def make(**ppo: Any) -> NemoRlJob:
        launcher = {"ray_address": "http://ray:8265", "gpus_per_node": 4}
        section = params["ppo"] | engine_settings.NEMO_RL | {"micro_batch_size": 2} | ppo
        made: Params = check_params(params | {"ppo": section, "launcher": launcher}, "test")
        models = [stage_dir("r0", stage) / "model" for stage in ("sft", "reward")]
        return NemoRlJob(made, Path("it's a job"), *models)

    return make


def read(config: Any, name: str) -> Any:
    for key in name.split("."):
        config = config[key]
    return config


def test_the_version_and_the_reward_model_are_those_of_the_checkout(nemo_rl):
    package = runpy.run_path(str(nemo_rl / "nemo_rl/package_info.py"))
    assert package["__shortversion__"] == NemoRlJob.version
    recipe = yaml.safe_load((nemo_rl / "examples/configs/grpo_rm_1B.yaml").read_text())
    section = recipe["env"]["reward_model"]
    for name, value in REWARD_MODEL.items():
        assert read(section, name) == value


def test_nemo_rl_reads_the_command_as_it_is_meant(job):
    made = job(warmup_updates=2, gradient_checkpointing=True)
    made.write_prompts([{"prompt": "a", "id": "1"}], load_tokenizer(made.sft))
    from_files = json.loads((made.folder / made.plugin).with_suffix(".json").read_text())
    config = rondo_check.compose_nemo_rl(made.arguments() + from_files)
    for name, value in made.options().items():
        assert read(config, name.removeprefix("++")) == value, name
    assert "it's a job" in config["data"]["train"]["data_path"]
    assert config["ppo"]["reward_scaling"] == {
        name.rpartition(".")[2]: value for name, value in made.score_scale().items()
    }
    ends = saved_end_tokens(made.sft, load_tokenizer(made.sft)).ids
    assert config["policy"]["generation"]["stop_token_ids"] == ends
    # derived by the recipe from what Rondo sets
    longest = made.options()["policy.max_total_sequence_length"]
    assert config["policy"]["generation"]["vllm_cfg"]["max_model_len"] == longest
    assert config["value"]["max_total_sequence_length"] == longest
    assert config["policy"]["logprob_batch_size"] == 2
    assert config["policy"]["tokenizer"]["name"] == str(made.sft)


def test_a_key_that_is_not_in_the_recipe_is_refused(job):
    from nemo_rl.utils.config import OverridesError

    with pytest.raises(OverridesError, match=r"Could not override 'policy\.precison'"):
        rondo_check.compose_nemo_rl(job(engine_options={"policy.precison": "float32"}).arguments())
    options = {"env.reward_model.precision": "float32", "+policy.more": 1}
    config = rondo_check.compose_nemo_rl(job(engine_options=options).arguments())
    assert (config["env"]["reward_model"]["precision"], config["policy"]["more"]) == ("float32", 1)


def test_checkpoints_are_named_as_the_driver_expects_and_none_is_deleted(job):
    from nemo_rl.utils.checkpoint import CheckpointManager

    made = job()
    config = rondo_check.compose_nemo_rl(made.arguments())["checkpointing"]
    manager = CheckpointManager(config)
    for step in (2, 4, 10):
        folder = manager.init_tmp_checkpoint(step, {"total_steps": step})
        assert not list(made.states.glob(f"step_{step}"))
        manager.finalize_checkpoint(folder)
    names = {path.name for path in made.states.glob("step_*")}
    assert names == {"step_2", "step_4", "step_10"}
    # whoever asks: so that Rondo deletes them before a job
    assert manager.get_latest_checkpoint_path() == str(made.states / "step_10")


def test_metrics_are_in_the_folder_that_rondo_reads(nemo_rl, code, job):
    made = job()
    logger = rondo_check.compose_nemo_rl(made.arguments())["logger"]
    folder = Path(code.get_next_experiment_dir(logger["log_dir"])) / "tensorboard"
    assert folder == made.events
    source = (nemo_rl / "nemo_rl/utils/logger.py").read_text()
    assert 'os.path.join(self.base_log_dir, "tensorboard")' in source


def test_nemo_rl_reads_the_prompts_as_the_tokens_of_the_sft_model(job):
    from nemo_rl.data.chat_templates import COMMON_CHAT_TEMPLATES
    from nemo_rl.data.datasets import load_response_dataset
    from nemo_rl.data.datasets.utils import update_single_dataset_config

    made = job(total_episodes=8, batch_size=4, mini_batch_size=4, micro_batch_size=1)
    prompts = load_prompts(made.params, "r0")
    made.write_inputs(prompts.train, prompts.tokenizer)
    tokens = [ids for _, ids in prompts.train]
    data = rondo_check.compose_nemo_rl(made.arguments())["data"]
    update_single_dataset_config(data["train"], data["default"])
    dataset = load_response_dataset(data["train"])
    tokenizer = load_tokenizer(made.sft)
    tokenizer.chat_template = COMMON_CHAT_TEMPLATES.passthrough_prompt_response
    assert len(dataset.dataset) == 8
    most = max(map(len, tokens))  # a prompt of that many tokens is not cut
    for index, row in enumerate(dataset.dataset):
        datum = dataset.processor(row, dataset.task_spec, tokenizer, most + 1, index)
        [message] = datum["message_log"]
        assert message["token_ids"].tolist() in tokens
        assert datum["loss_multiplier"] == 1.0


def test_the_reward_model_reads_prompt_and_response_and_eos(job):
    """As Rondo's stages have it, also of a tokenizer that has a BOS, but adds none."""
    from nemo_rl.data.chat_templates import COMMON_CHAT_TEMPLATES
    from nemo_rl.data.interfaces import TaskDataSpec
    from nemo_rl.data.llm_message_utils import get_formatted_message_log

    made = job()
    policy = load_tokenizer(made.sft)
    saved = load_tokenizer(made.reward)
    saved.bos_token = "<|bos|>"
    saved.save_pretrained(made.reward)
    made.write_prompts([{"prompt": "a", "id": "1"}], policy)
    reader = load_tokenizer(made.reward_tokenizer)
    reader.chat_template = COMMON_CHAT_TEMPLATES.passthrough_prompt_response
    for prompt, response in (("Is it a cat?\n", "It is.\n"), ("Why", "")):
        log = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        spec = TaskDataSpec(task_name="reward_model_env")
        formatted = get_formatted_message_log(log, reader, spec)
        read_ids = torch.cat([message["token_ids"] for message in formatted]).tolist()
        expected = [policy(text, add_special_tokens=False).input_ids for text in (prompt, response)]
        assert read_ids == [*expected[0], *expected[1], policy.eos_token_id]


def test_scores_are_calibrated_and_clipped(code, job):
    made = job(score_clip=2.0)
    model = read_json(made.reward / "config.json", "")
    scale = {name.rpartition(".")[2]: value for name, value in made.score_scale().items()}
    raw = model["mean"] + model["std"] * torch.tensor([-9.0, -2.0, -0.5, 0.0, 1.5, 2.0, 2.5])
    batch = code.scale_rewards({"total_reward": raw}, scale)
    expected = torch.tensor([-2.0, -2.0, -0.5, 0.0, 1.5, 2.0, 2.0])
    torch.testing.assert_close(batch["total_reward"], expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def rollout() -> dict[str, torch.Tensor]:
    """Three episodes: prompts of 2 tokens, responses of 5, 3 and 1, and a message after each, whose
    tokens must not count.
    """
    torch.manual_seed(0)
    mask = torch.zeros(3, 9)
    for row, length in enumerate((5, 3, 1)):
        mask[row, 2 : 2 + length] = 1.0
    names = ("logprobs", "old", "reference", "values", "old_values", "advantages", "returns")
    return {"mask": mask, "scores": torch.tensor([3.0, -0.5, -2.0])} | {
        name: torch.randn(3, 9) for name in names
    }


def loss_config(job: Callable[..., NemoRlJob], section: str) -> SimpleNamespace:
    ppo = {"cliprange": CLIP, "cliprange_value": CLIP, "kl_coef": KL_COEF, "gamma": GAMMA}
    config = rondo_check.compose_nemo_rl(job(lam=LAM, **ppo).arguments())
    return SimpleNamespace(**{"use_cispo": False} | read(config, section))


def test_rewards_kl_and_advantages(code, job, rollout):
    section = loss_config(job, "ppo.adv_estimator")
    estimator = code.GeneralizedAdvantageEstimator(vars(section), loss_config(job, "loss_fn"))
    advantages, returns = estimator.compute_advantage(
        prompt_ids=None,
        rewards=rollout["scores"],
        mask=rollout["mask"],
        values=rollout["values"],
        reference_logprobs=rollout["reference"],
        logprobs=rollout["old"],
    )
    tokens = rollout["mask"].bool()

    def responses(name: str) -> torch.Tensor:
        return rollout[name][:, 2:7]

    mask = tokens[:, 2:7]
    rewards = functional.token_rewards(
        rollout["scores"], responses("old"), responses("reference"), mask, KL_COEF
    )
    own, own_returns = functional.gae(rewards, responses("values"), mask, GAMMA, LAM)
    torch.testing.assert_close(returns[tokens], own_returns[mask])
    # NeMo RL divides by the standard deviation of a sample, Rondo by that of the batch's tokens
    number = int(mask.sum())
    own = functional.whiten(own, mask) * ((number - 1) / number) ** 0.5
    torch.testing.assert_close(advantages[tokens], own[mask])


def test_the_kl_of_a_token_is_limited(code):
    kl = code.calculate_kl(torch.tensor([0.0, 15.0]), torch.tensor([-3.0, 0.0]), "k1")
    assert kl.tolist() == [3.0, 10.0]


def test_losses(code, job, rollout):
    """The loss of the policy is of the tokens from the second on."""
    data = {
        "token_mask": rollout["mask"],
        "sample_mask": torch.ones(3),
        "advantages": rollout["advantages"],
        "prev_logprobs": rollout["old"],
        "generation_logprobs": rollout["old"],
        "values": rollout["old_values"],
        "returns": rollout["returns"],
    }
    number, mask = rollout["mask"].sum(), rollout["mask"].bool()
    policy_loss = code.ClippedPGLossFn(loss_config(job, "loss_fn"))
    loss, metrics = policy_loss(rollout["logprobs"][:, 1:], data, torch.tensor(3.0), number)
    own, _ = functional.policy_loss(
        rollout["logprobs"], rollout["old"], rollout["advantages"], functional.Clip(CLIP, CLIP)
    )
    torch.testing.assert_close(functional.masked_mean(own, mask), loss)
    assert metrics["kl_penalty"] == 0  # it is in the reward: no metric has it
    value_loss = code.MseValueLossFn(loss_config(job, "value_loss_fn"))
    loss, _ = value_loss(rollout["values"], data, torch.tensor(3.0), number)
    own, _ = functional.value_loss(
        rollout["values"], rollout["old_values"], rollout["returns"], CLIP
    )
    torch.testing.assert_close(functional.masked_mean(own, mask), loss)


def test_names_of_metrics_are_those_that_nemo_rl_writes(nemo_rl):
    paths = (
        "algorithms/ppo.py",
        "algorithms/loss/loss_functions.py",
        "experience/rollouts.py",
        "models/policy/workers/dtensor_policy_worker_v2.py",  # the learning rate
    )
    sources = [(nemo_rl / "nemo_rl" / path).read_text() for path in paths]
    for tag in METRICS:
        assert f'"{tag.removeprefix("train/")}"' in "".join(sources), tag
    # of the two calls, the one with the times of an update is the last
    ends = [sources[0].rindex(f'prefix="{prefix}"') for prefix in ("train", "timing/train")]
    assert ends == sorted(ends)
    assert 'timer.time("total_step_time")' in sources[0]
