"""A job of verl, for tests."""

from pathlib import Path
from typing import Any

from stages.lib.core.params import Params, check_params
from stages.ppo.engines.verl import VerlJob
from tests import engine_settings
from tests.stages.ppo.engines.test_openrlhf import Letters


class TwoEnds(Letters):
    eos_token_id = 2


def make(**sections: Any) -> Params:
    ppo = engine_settings.VERL | {"micro_batch_size": 2} | sections.pop("ppo", {})
    launcher = {"ray_address": "http://ray:8265"} | sections.pop("launcher", {})
    return check_params({"ppo": ppo, "launcher": launcher} | sections, "test")


def job_of(params: Params, folder: Path = Path("/work"), models: Path = Path("/")) -> VerlJob:
    return VerlJob(params, folder, models / "sft", models / "reward")
