"""verl's own code, from its wheel: its config, checks, dataset and formulas."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params, check_params
from stages.lib.lm.loading import load_tokenizer
from stages.ppo.alternatives.stage import load_prompts
from stages.ppo.engines import rondo_check
from stages.ppo.engines.job import hydra_value, write_critic
from stages.ppo.engines.verl import ACTOR, METRICS, MODEL, VerlJob
from stages.ppo.trainer import functional
from tests import engine_settings
from tests.stages.ppo.engines.jobs import VERL_WHEEL, needs_verl, unpack_verl

pytestmark = needs_verl
GAMMA, LAM, CLIP, KL_COEF = 0.97, 0.9, 0.2, 0.3


@pytest.fixture(autouse=True)
def verl(monkeypatch) -> Path:
    """verl's files, which can be imported."""
    folder = unpack_verl()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def job(make_round) -> Callable[..., VerlJob]:
    """A job of a round whose SFT and reward models are there."""
    params = make_round("r0", 1.0).model_dump(mode="json")

    def make(**ppo: Any) -> VerlJob:
        launcher = {"ray_address": "http://ray:8265", "gpus_per_node": 4}
        section = params["ppo"] | engine_settings.VERL | {"micro_batch_size": 2} | ppo
        made: Params = check_params(params | {"ppo": section, "launcher": launcher}, "test")
        models = [stage_dir("r0", stage) / "model" for stage in ("sft", "reward")]
        made_job = VerlJob(made, Path("it's a job"), *models)
        # verl's checks read its config
        write_critic(made_job.reward, made_job.critic_start, "verl")
        return made_job

    return make


def read(config: Any, name: str) -> Any:
    from omegaconf import OmegaConf

    value = OmegaConf.select(config, name)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def test_verl_reads_the_command_as_it_is_meant_and_its_checks_accept_it(job):
    assert Path(VERL_WHEEL).name.split("-")[1] == VerlJob.version
    made = job()
    config = rondo_check.verl(made.arguments())
    for name, value in made.options().items():
        assert read(config, name.removeprefix("+")) == value, name
    assert "it's a job" in read(config, "ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR")


def test_verl_says_how_a_key_that_its_config_does_not_name_is_added(job):
    name = f"{MODEL}.override_config.attn_implementation"
    with pytest.raises(Exception, match=rf"To append to your config use \+{name}='sdpa'"):
        rondo_check.verl(job(engine_options={name: "sdpa"}).arguments())
    config = rondo_check.verl(job(engine_options={f"+{name}": "sdpa"}).arguments())
    assert read(config, name) == "sdpa"
    strategy = {f"{ACTOR}.strategy": "megatron"}  # whose settings are in another config of verl's
    with pytest.raises(Exception, match="megatron"):
        rondo_check.verl(job(engine_options=strategy).arguments())


def test_policy_and_critic_have_the_micro_batches_and_wait_in_ram(job):
    """What verl makes of its config: it has dynamic batches for a critic unless told otherwise."""
    from verl.utils.config import omega_conf_to_dataclass

    made = job(micro_batch_size=4)
    config = rondo_check.verl(made.arguments())
    actor, critic = (
        omega_conf_to_dataclass(section)
        for section in (config.actor_rollout_ref.actor, config.critic)
    )
    assert (actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu) == (False, 4)
    engine = critic.engine
    assert engine.use_dynamic_bsz is False
    assert (engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu) == (4, 4)
    for each in (actor.engine, critic.engine):
        assert (each.param_offload, each.optimizer_offload) == (True, True)
    sizes = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}
    sizes |= {"critic.fsdp.ulysses_sequence_parallel_size": 4}
    split = rondo_check.verl(job(engine_options=sizes).arguments())
    for section, size in ((split.actor_rollout_ref.actor, 2), (split.critic, 4)):
        assert omega_conf_to_dataclass(section).engine.ulysses_sequence_parallel_size == size


@pytest.mark.parametrize(
    "value", ["it's", "a\\", "a\\'b", "a b,c=[d]{e}", "", "10", "null", "{{ m['c'] }}", "/a/b-1"]
)
def test_hydra_reads_texts_as_they_are(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for expected in (value, [value, 1, True, 0.5]):
        [override] = OverridesParser.create().parse_overrides([f"a={hydra_value(expected)}"])
        assert override.value() == expected


def test_verl_reads_the_prompts_as_the_tokens_of_the_sft_model(job):
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

    made = job(total_episodes=8, batch_size=4, mini_batch_size=4, micro_batch_size=1)
    prompts = load_prompts(made.params, "r0")
    made.write_inputs(prompts.train, prompts.tokenizer)
    tokens = {row["id"]: ids for row, ids in prompts.train}
    config = {"prompt_key": "prompt", "filter_overlong_prompts": False}
    tokenizer = load_tokenizer(made.sft)
    tokenizer.chat_template = made.options()[f"{MODEL}.custom_chat_template"]
    dataset = RLHFDataset(str(made.prompts), tokenizer, config)
    builder = ContinuousTokenBuilder(tokenizer)
    assert len(dataset) == 8
    for row in (dataset[index] for index in range(8)):
        ids = builder.build_initial_tokens(row["raw_prompt"])
        assert ids == tokens[row["extra_info"]["id"]]


@pytest.fixture
def rollout() -> dict[str, torch.Tensor]:
    """Three episodes of 5, 3 and 1 tokens; padding has other numbers, which must not count."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    scores = torch.zeros(3, 5)
    scores[torch.arange(3), mask.sum(1) - 1] = torch.tensor([3.0, -0.5, -2.0])
    names = ("logprobs", "old", "reference", "values", "old_values", "advantages", "returns")
    return {"mask": mask, "scores": scores} | {name: torch.randn(3, 5) for name in names}


def test_rewards_kl_and_advantages(rollout):
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    mask = rollout["mask"]
    fields = {
        "response_mask": mask.long(),
        "token_level_scores": rollout["scores"],
        "old_log_probs": rollout["old"],
        "ref_log_prob": rollout["reference"],
    }
    data, metrics = apply_kl_penalty(
        DataProto(batch=TensorDict(fields, batch_size=3)), core_algos.FixedKLController(KL_COEF)
    )
    rewards = functional.token_rewards(
        rollout["scores"].sum(1), rollout["old"], rollout["reference"], mask, KL_COEF
    )
    torch.testing.assert_close(data.batch["token_level_rewards"][mask], rewards[mask])
    kl = (rollout["old"] - rollout["reference"]) * mask
    per_token = (kl.sum(1) / mask.sum(1)).mean()
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(float(per_token), rel=1e-5)
    advantages, returns = core_algos.compute_gae_advantage_return(
        data.batch["token_level_rewards"], rollout["values"], mask.long(), GAMMA, LAM
    )
    own, own_returns = functional.gae(rewards, rollout["values"], mask, GAMMA, LAM)
    torch.testing.assert_close(returns[mask], own_returns[mask])
    # verl divides by the standard deviation of a sample, Rondo by that of the batch's tokens
    tokens = int(mask.sum())
    own = functional.whiten(own, mask) * math.sqrt((tokens - 1) / tokens)
    torch.testing.assert_close(advantages[mask], own[mask])


def test_losses(rollout):
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    mask = rollout["mask"]
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=CLIP,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
        clip_ratio_c=1e9,  # verl also clips where the advantage is negative: docs/engines.md
    )
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        rollout["old"], rollout["logprobs"], rollout["advantages"], mask, config=config
    )
    own, clipped = functional.policy_loss(
        rollout["logprobs"], rollout["old"], rollout["advantages"], functional.Clip(CLIP, CLIP)
    )
    torch.testing.assert_close(functional.masked_mean(own, mask), loss)
    share = float(functional.masked_mean(clipped.float(), mask))
    assert metrics["actor/pg_clipfrac"] == pytest.approx(share)
    assert 0 < share < 1
    value_loss, _ = core_algos.compute_value_loss(
        rollout["values"], rollout["returns"], rollout["old_values"], mask, CLIP, "token-mean"
    )
    own_loss, _ = functional.value_loss(
        rollout["values"], rollout["old_values"], rollout["returns"], CLIP
    )
    torch.testing.assert_close(functional.masked_mean(own_loss, mask), value_loss)


def test_names_of_metrics_are_those_that_verl_writes(verl):
    sources = [
        (verl / "verl" / path).read_text()
        for path in (
            "workers/utils/losses.py",
            "trainer/ppo/core_algos.py",
            "trainer/ppo/metric_utils.py",
            "trainer/ppo/ray_trainer.py",
            "trainer/ppo/v1/trainer_base.py",
        )
    ]
    added = {"actor/grad_norm", "critic/grad_norm", "actor/lr"}  # with a prefix, by the trainer
    for name in METRICS.keys() - added:
        assert any(f'"{name}"' in source for source in sources), name
    engine = (verl / "verl/workers/engine_workers.py").read_text()
    for name in added:
        assert f'"{name.partition("/")[2]}"' in engine, name
