"""Which evaluations may stand side by side: those of the same prompts, answered and judged alike."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json, stage_dir
from stages.lib.core.params import Params
from stages.lib.data.splits import evaluation_hash

Settings = Mapping[str, Any]  # by key of params.yaml, and `evaluation_hash`


def eval_set_hash(round_: str) -> str:
    """The evaluation set's hash.

    Raises:
        BadInput: the held-out files are not those that prepare has written.
    """
    folder = stage_dir(round_, "prepare")
    frozen: str = read_json(folder / "manifest.json", f"dvc repro prepare@{round_}")[
        "evaluation_hash"
    ]
    if evaluation_hash(folder / "data") != frozen:
        raise BadInput(
            f"{folder}/data: the held-out files are not those of prepare's manifest.json; run `dvc repro prepare@{round_}`"
        )
    return frozen


def evaluation_settings(params: Params, frozen: str) -> dict[str, Any]:
    """All that an evaluation's numbers depend on but the models. frozen: the hash of the frozen
    set.
    """
    asked = ("base_url", "max_completion_tokens", "model", "rubric")
    models = {
        f"{key}.{name}": getattr(endpoint, name)
        for key, endpoint in params.language_models().values()
        for name in asked
    }
    return {
        "evaluation_hash": frozen,
        "evaluate.judges": params.evaluate.judges,
        **models,
        "evaluate.checkpoint_samples_per_prompt": params.evaluate.checkpoint_samples_per_prompt,
        "evaluate.samples_per_prompt": params.evaluate.samples_per_prompt,
        "evaluate.tie_margin": params.evaluate.tie_margin,
        "ppo.response_length": params.ppo.response_length,
        "ppo.temperature": params.ppo.temperature,
        "prepare.prompt_format": params.prepare.prompt_format.value,
        "seed": params.seed,
    }


def evaluation_id(settings: Settings) -> str:
    """The first 16 hex digits of a sha256."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def differences(a: Settings, b: Settings) -> list[str]:
    """What two evaluations were set to otherwise, e.g. `ppo.temperature 1.0 and 0.7`; nothing where
    they may be compared.
    """
    return [
        f"{key} {a.get(key)} and {b.get(key)}"
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    ]


def check_comparable(evaluations: Mapping[str, Settings]) -> None:
    """evaluations: settings by round.

    Raises:
        BadInput: they differ; names the rounds and each key.
    """
    first = next(iter(evaluations), "")
    for name, settings in evaluations.items():
        if found := differences(evaluations[first], settings):
            raise BadInput(
                f"{first} and {name} were evaluated otherwise ({'; '.join(found)}), so that their numbers cannot be compared: "
                f"run `dvc repro evaluate@{first} evaluate@{name}`"
            )
