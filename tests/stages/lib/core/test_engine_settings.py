"""Settings that an engine cannot honour are refused before a run, each with the value to set."""

from typing import Any

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.engines import REQUIRED
from tests.engine_settings import NEEDED

LAUNCHER = {"ray_address": "http://ray:8265"}


def check(launcher: dict[str, Any] = LAUNCHER, algorithm: str = "ppo", **ppo: Any) -> Params:
    section = NEEDED | {"micro_batch_size": 4} | ppo
    return check_params({"launcher": launcher, "algorithm": algorithm, "ppo": section}, "test")


def test_the_defaults_are_refused_with_every_value_to_set():
    with pytest.raises(BadInput) as refusal:
        check_params({"ppo": {"engine": "openrlhf"}}, "test")
    assert str(refusal.value) == (
        'test: ppo: Value error, engine openrlhf needs ppo.init_from="sft", '
        'ppo.kl_control="fixed", ppo.lora.r=0, ppo.critic_lora.r=0, ppo.missing_eos_penalty=0.0 '
        "(docs/engines.md says why; `--preset openrlhf` sets all of them)"
    )


@pytest.mark.parametrize("engine", REQUIRED)
def test_an_engine_takes_the_settings_that_it_needs(engine):
    assert check(engine=engine).ppo.engine.value == engine


@pytest.mark.parametrize("engine", REQUIRED)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic", "policy"),
        ("init_from", "champion"),
        ("kl_control", "adaptive"),
        ("loss_level", "sequence"),
        ("lora", {"r": 8}),
        ("critic_lora", {"r": 8}),
        ("reward_weight", 0.5),
        ("rewards", [{"name": "more", "function": "rewards:more"}]),
        ("whiten_rewards", True),
        ("kl_coef", 0.0),
    ],
)
def test_a_setting_that_no_engine_has_is_named(engine, key, value):
    name = f"{key}.r" if "lora" in key else key
    with pytest.raises(BadInput, match=rf"engine {engine} needs ppo\.{name}[= ]"):
        check(engine=engine, **{key: value})


@pytest.mark.parametrize(
    ("key", "engines"),
    [
        ("length_penalty", {"openrlhf", "nemo_rl"}),
        ("missing_eos_penalty", {"openrlhf", "nemo_rl"}),
        ("entropy_coef", {"nemo_rl"}),
    ],
)
def test_a_setting_that_an_engine_lacks_is_named(key, engines):
    for engine in REQUIRED:
        if engine in engines:
            with pytest.raises(BadInput, match=rf"engine {engine} needs ppo\.{key}=0\.0"):
                check(engine=engine, **{key: 0.1})
        else:
            check(engine=engine, **{key: 0.1})


def test_a_served_reward_model_is_refused():
    with pytest.raises(BadInput, match="reward_url"):
        check(reward_url="http://rewards:8000/get_reward", critic="policy")


def test_an_engine_needs_a_cluster_and_ppo():
    with pytest.raises(BadInput, match=r"set launcher\.ray_address to the Ray cluster's dashboard"):
        check(launcher={})
    with pytest.raises(BadInput, match="algorithm is rloo, which Rondo trains itself"):
        check(algorithm="rloo")
    with pytest.raises(BadInput, match="engine is local, which has none"):
        check_params({"ppo": {"engine_options": {"ds.zero_stage": 2}}}, "test")


def test_one_process_follows_an_engine_which_shards_by_its_own_options():
    params = check(LAUNCHER | {"processes": 4})
    assert (params.processes("ppo"), params.processes("sft")) == (1, 4)
    with pytest.raises(BadInput, match=r"launcher.shard needs ppo.engine local \(got openrlhf\)"):
        check(LAUNCHER | {"shard": True, "processes": 2})
