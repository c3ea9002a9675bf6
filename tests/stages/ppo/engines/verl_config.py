"""The config of a real verl wheel.

    python -m tests.stages.ppo.engines.verl_config verl-*.whl > verl.json

It needs Hydra, and `Verl.validate` what verl imports, but no GPU (`make test-engines` installs
them).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

WRITTEN_OUT = "verl/trainer/config/_generated_ppo_trainer.yaml"
MANDATORY = "???"


class Verl:
    """A wheel, of which `folder` gets the files.

    Attributes:
        version: of the wheel.
    """

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.version, self.folder = wheel.name.split("-")[1], folder
        if not folder.exists():
            with ZipFile(wheel) as archive:
                archive.extractall(folder)

    def options(self) -> dict[str, Any]:
        """The keys of the config without those that name a class, with their defaults; null where
        there is none.
        """
        from omegaconf import OmegaConf

        config = OmegaConf.load(self.folder / WRITTEN_OUT)
        return dict(leaves(OmegaConf.to_container(config, resolve=True)))

    def compose(self, arguments: Sequence[str]) -> Any:
        """The config that the training would get.

        Raises:
            HydraException: an argument cannot be read, or there is no such key.
        """
        from hydra import compose, initialize_config_dir

        with initialize_config_dir(str(self.folder / "verl/trainer/config"), version_base=None):
            return compose("ppo_trainer", overrides=list(arguments))

    def validate(self, arguments: Sequence[str]) -> Any:
        """`compose`, and the checks that the command makes before it starts its workers.

        Raises:
            AssertionError, ValueError, InstantiationException: the checks refuse it.
        """
        config = self.compose(arguments)
        self.check(config)
        return config

    def check(self, config: Any) -> None:
        """The checks of a config."""
        sys.path.insert(0, str(self.folder))
        try:
            from verl.trainer.ppo.utils import need_critic, need_reference_policy
            from verl.utils.config import validate_config
        finally:
            sys.path.remove(str(self.folder))
        validate_config(config, need_reference_policy(config), need_critic(config))


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", None if value == MANDATORY else value


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    from tests.stages.ppo.engines.record import print_record

    with TemporaryDirectory() as folder:
        verl = Verl(Path(sys.argv[1]), Path(folder, "wheel"))
        print_record(verl.version, verl.options())
