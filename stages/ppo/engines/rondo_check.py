"""Has an engine read its options without training, in the engine's own environment.

A copy is in the job's folder, with the options in a JSON file beside it; no part of Rondo is
imported. What the engine refuses is written to refusal.txt, in the engine's own words.
"""

import argparse
import ast
import json
import sys
from collections.abc import Callable
from datetime import datetime
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

CONFIGS = "examples/configs"  # of NeMo RL, which has them in its repository alone


class Refused(Exception):
    """Why the options cannot be read."""


class Captured(Exception):
    """What OpenRLHF's command gives to its training."""


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = PathFinder.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Refused(f"{sys.executable} on the Ray cluster has no package {name}")
    return Path(spec.submodule_search_locations[0])


def openrlhf(options: list[str]) -> Any:
    """The arguments of the training, by the parser of OpenRLHF's command and the checks after it:
    its `__main__` block alone is run, with the training left out.
    """

    class Parser(argparse.ArgumentParser):
        def __init__(self) -> None:
            super().__init__(allow_abbrev=False, add_help=False)

        def error(self, message: str) -> Any:
            raise Refused(message)

    def train(args: Any) -> None:
        raise Captured(args)

    folder = package("openrlhf")
    command = folder / "cli/train_ppo_ray.py"
    # the packages' own modules import what needs GPUs
    for name, path in (("openrlhf", folder), ("openrlhf.utils", folder / "utils")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    main = ast.parse(command.read_text()).body[-1]
    assert isinstance(main, ast.If), command
    known = {**vars(argparse), "ArgumentParser": Parser}
    sys.argv[1:] = options
    names = {"argparse": SimpleNamespace(**known), "datetime": datetime, "train": train}
    try:
        exec(compile(ast.Module(main.body, []), str(command), "exec"), names)
    except Captured as captured:
        return captured.args[0]
    raise Refused("the command does not reach its training")


def verl(options: list[str]) -> Any:
    """The config that Hydra composes, checked as verl's command does. A critic is checked once its
    model is there, whose config verl reads.
    """
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(package("verl") / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=options)
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    with_critic = Path(config.critic.model.path).is_dir()
    validate_config(config, need_reference_policy(config), with_critic)
    return config


def compose_nemo_rl(options: list[str]) -> dict[str, Any]:
    """The config that NeMo RL's command makes of its recipe and the overrides."""
    from nemo_rl.utils.config import (
        load_config,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    recipe = package("nemo_rl").parent / CONFIGS / "ppo_math_1B.yaml"
    config: Any = parse_hydra_overrides(load_config(recipe), options)
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


def nemo_rl(options: list[str]) -> Any:
    """The config, checked as NeMo RL's command does."""
    from nemo_rl.algorithms.ppo import MasterConfig

    return MasterConfig(**compose_nemo_rl(options))


READERS: dict[str, Callable[[list[str]], Any]] = {
    "openrlhf": openrlhf,
    "verl": verl,
    "nemo_rl": nemo_rl,
}


def check(engine: str, expected: str, options: list[str]) -> None:
    """
    Raises:
        Refused: the engine is not installed, or another version of it.
        Exception: of the engine's own: it cannot read an option.
    """
    try:
        installed = version(engine)
    except PackageNotFoundError as error:
        raise Refused(f"{sys.executable} on the Ray cluster has no package {engine}") from error
    if installed.partition("+")[0] != expected:  # +: of which commit
        raise Refused(f"the Ray cluster has {engine} {installed}, and Rondo needs {expected}")
    READERS[engine](options)


if __name__ == "__main__":
    refusal = Path(__file__).with_name("refusal.txt")
    refusal.unlink(missing_ok=True)
    try:
        check(**json.loads(Path(__file__).with_suffix(".json").read_text()))
    except ImportError:  # of what the engine needs: no matter of options
        raise
    except (Exception, SystemExit) as error:
        refusal.write_text(str(error) or type(error).__name__)
        sys.exit(f"refused: {error}")
