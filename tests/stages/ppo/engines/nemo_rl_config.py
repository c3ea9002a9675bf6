"""The config of a checkout of NeMo RL.

    python -m tests.stages.ppo.engines.nemo_rl_config RL > nemo_rl.json

It needs Hydra, but no GPU.
"""

import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONFIGS = "examples/configs"
PPO, REWARD = "ppo_math_1B.yaml", "grpo_rm_1B.yaml"  # the second has the reward model


class NemoRl:
    """A checkout.

    Attributes:
        version: of the checkout.
    """

    def __init__(self, folder: Path) -> None:
        package = runpy.run_path(str(folder / "nemo_rl/package_info.py"))
        self.version: str = package["__shortversion__"]
        self.folder = folder
        # its module, without the package, which imports what needs a GPU
        self.code = SimpleNamespace(**runpy.run_path(str(folder / "nemo_rl/utils/config.py")))
        self.code.register_omegaconf_resolvers()

    def options(self) -> dict[str, Any]:
        """The keys of its PPO config, and those of the reward model, with their defaults; null
        where there is none.
        """
        from omegaconf import OmegaConf

        config = self.load(PPO)
        config.env.reward_model = self.load(REWARD).env.reward_model
        return dict(leaves(OmegaConf.to_container(config, resolve=True)))

    def load(self, name: str) -> Any:
        return self.code.load_config(self.folder / CONFIGS / name)

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The config that the training would get.

        Raises:
            OverridesError: an override cannot be read, or there is no such key.
        """
        from omegaconf import OmegaConf

        config = self.code.parse_hydra_overrides(self.load(PPO), list(overrides))
        composed: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
        return composed


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


if __name__ == "__main__":
    from tests.stages.ppo.engines.record import print_record

    nemo_rl = NemoRl(Path(sys.argv[1]))
    print_record(nemo_rl.version, nemo_rl.options())
