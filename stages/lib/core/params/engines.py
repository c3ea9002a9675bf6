"""What section `ppo` must have if an engine trains (docs/engines.md has the reasons).

The engine checks its own options, on the cluster: stages/ppo/engines/__init__.py.
"""

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

Value = bool | int | float | str
Options = dict[str, Value | list[Value]]

# No engine does otherwise: they start the policy and the reference from the same model, and train
# all weights.
COMMON: dict[str, Any] = {
    "cliprange_high": None,
    "critic": "reward",
    "delta": None,
    "init_from": "sft",
    "kl_control": "fixed",
    "loss_level": "token",
    "lora.r": 0,
    "critic_lora.r": 0,
    "mask_truncated_completions": False,
    "reward_url": None,
    "reward_weight": 1.0,
    "rewards": [],
    "whiten_rewards": False,
}
NO_PENALTIES = {"length_penalty": 0.0, "missing_eos_penalty": 0.0}
# by engine: keys of section `ppo`, with the one value that the engine can honour
REQUIRED: dict[str, Mapping[str, Any]] = {
    "openrlhf": COMMON | NO_PENALTIES,
    "verl": COMMON,
    "nemo_rl": COMMON | NO_PENALTIES | {"entropy_coef": 0.0},
}


def check_settings(engine: str, ppo: Any) -> None:
    """Check that the engine can do what section `ppo` wants.

    Raises:
        ValueError: names each key that it cannot honour, with the value to set.
    """
    different = [
        f"ppo.{key}={json.dumps(value)}"
        for key, value in REQUIRED[engine].items()
        if attrgetter(key)(ppo) != value
    ]
    if not ppo.kl_coef:  # then it would load no reference, and measure no KL
        different.append("ppo.kl_coef above 0")
    if different:
        raise ValueError(
            f"engine {engine} needs {', '.join(different)} (docs/engines.md says why; "
            "`--preset openrlhf` sets all of them)"
        )
