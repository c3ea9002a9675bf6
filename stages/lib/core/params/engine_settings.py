"""What Rondo knows of an engine for PPO before a run: its options, and what it cannot do.

The options of each engine's pinned version are recorded in a file, from its own parser or config.
An engine would find many mistakes only after it has loaded the models, or not at all; so all are
looked for here.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

Value = bool | int | float | str
Options = dict[str, Value | list[Value]]

# What no engine does as Rondo does: they start the policy and the reference from the same model,
# and train all weights. Why kl_control must be fixed: each engine's module.
REQUIRED: dict[str, Any] = {
    "critic": "reward",
    "init_from": "sft",
    "kl_control": "fixed",
    "loss_level": "token",
    "lora.r": 0,
    "critic_lora.r": 0,
    "reward_url": None,
    "reward_weight": 1.0,
    "rewards": [],
    "whiten_rewards": False,
}


class EngineSettings(ABC):
    """The settings of one engine.

    Attributes:
        name: value of `ppo.engine`.
        title: as its authors write it.
        recorded: file with the options of the version.
        required: keys of section `ppo` with the one value that the engine can honour.
        set_by: what sets an option, or all options below a name: other keys of params.yaml, or
            Rondo, which needs them as it sets or leaves them. "": the user may.
        version: the only one that is known.
        options: what the recorded file has of each option.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    recorded: ClassVar[str]
    required: ClassVar[Mapping[str, Any]]
    set_by: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        recorded = json.loads(Path(__file__).with_name(self.recorded).read_text())
        self.version: str = recorded["version"]
        self.options: dict[str, Any] = recorded["options"]

    def settings_to_change(self, ppo: Any) -> dict[str, Any]:
        """The keys of section `ppo` that the engine cannot honour, with the value to set."""
        return {
            f"ppo.{key}": value
            for key, value in self.required.items()
            if attrgetter(key)(ppo) != value
        }

    def check_settings(self, ppo: Any) -> None:
        """Check that the engine can do what section `ppo` wants.

        Raises:
            ValueError: names each key that it cannot honour, with the value to set.
        """
        change = self.settings_to_change(ppo)
        different = [f"{key}={json.dumps(value)}" for key, value in change.items()]
        if not ppo.kl_coef:  # then it would load no reference, and measure no KL
            different.append("ppo.kl_coef above 0")
        if different:
            raise ValueError(
                f"engine {self.name} needs {', '.join(different)} (docs/engines.md says why; "
                "`--preset openrlhf` sets all of them)"
            )

    def check_options(self, options: Options) -> None:
        """Check names and types of `ppo.engine_options`.

        Raises:
            ValueError: the engine has no such option, another key sets it, or its value is none.
        """
        for name, value in options.items():
            where = f"engine_options.{name}"
            if name not in self.options:
                free = [option for option in self.options if not self.setter(option)]
                near = get_close_matches(name, free, n=1)
                hint = f": did you mean {near[0]}?" if near else " (names without the leading --)"
                raise ValueError(f"{where}: {self.title} {self.version} has no such option{hint}")
            if setter := self.setter(name):
                needs = ", or needs it as it is" if setter == "Rondo" else ""
                raise ValueError(f"{where}: {setter} sets it{needs}; remove it here")
            if expected := self.mistake(name, value):
                raise ValueError(f"{where}: expected {expected}, got {value!r}")

    def setter(self, name: str) -> str:
        """What sets an option, by the longest name in `set_by` that it has or is below."""
        while name not in self.set_by and "." in name:
            name = name.rpartition(".")[0]
        return self.set_by.get(name, "")

    @abstractmethod
    def mistake(self, name: str, value: Value | list[Value]) -> str:
        """What an option expects, if the value is something else; "" if it fits."""

    @abstractmethod
    def placement(self, nodes: int, gpus_per_node: int, options: Options) -> Options:
        """Where the models run: all of them on all GPUs, by turns, but for what `options` say."""

    @abstractmethod
    def check_placement(self, placed: Options, ppo: Any) -> None:
        """Check what the engine would find after the models are loaded, or not at all.

        Args:
            placed: `placement`.
            ppo: section `ppo` of params.yaml.

        Raises:
            ValueError: the numbers of GPUs, engines and episodes do not fit each other.
        """


def check_workers(role: str, workers: int, ppo: Any) -> None:
    """Check that the data-parallel workers of a role get equal numbers of whole micro-batches.

    Raises:
        ValueError: they do not.
    """
    if not workers or ppo.mini_batch_size % (ppo.micro_batch_size * workers):
        raise ValueError(
            f"ppo.mini_batch_size {ppo.mini_batch_size} must be a multiple of "
            f"ppo.micro_batch_size {ppo.micro_batch_size} times the {workers} data-parallel "
            f"workers of the {role}"
        )


def unlike_default(default: Any, value: Value | list[Value], whole: bool) -> str:
    """What an option expects by the type of its default, if the value is of another type; "" if it
    fits. A default of null fits any value.

    Args:
        whole: whether an option with a whole number as its default takes no fractions.

    >>> unlike_default(1, 0.5, whole=True), unlike_default(1, 0.5, whole=False)
    ('a value of type int', '')
    """
    if isinstance(default, dict):
        return "no value: set the keys below it, which Rondo does not know"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "a value of type bool"
    if isinstance(default, int | float):
        whole = whole and isinstance(default, int)
        number = isinstance(value, int if whole else int | float)
        fits = number and not isinstance(value, bool)
        return "" if fits else f"a value of type {'int' if whole else 'float'}"
    if isinstance(default, list):
        return "" if isinstance(value, list) else "a list"
    return "" if default is None or isinstance(value, str) else "a value of type str"
