"""Which evaluations can be compared: those with the same prompts, sampling and judges."""

from collections.abc import Mapping
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.files import json_hash, read_json, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import ZERO_SHOT
from stages.lib.core.user_inputs import input_hashes
from stages.lib.data.splits import evaluation_hash

Settings = Mapping[str, Any]  # `evaluation_hash`, and values by key of params.yaml


def eval_set_hash(round_: str) -> str:
    """The hash of the frozen evaluation set, checked against the files.

    Raises:
        BadInput: the held-out files are not those that prepare wrote.
    """
    folder = stage_dir(round_, "prepare")
    manifest = read_json(folder / "manifest.json")
    frozen: str = manifest["evaluation_hash"]
    if evaluation_hash(folder / "data") != frozen:
        raise BadInput(
            f"{folder}/data: the held-out files are not those of prepare's manifest.json; "
            f"run `dvc repro prepare@{round_}`"
        )
    return frozen


def evaluation_settings(params: Params, eval_hash: str) -> dict[str, Any]:
    """All settings that an evaluation's numbers depend on, except the models.

    eval_hash: see `eval_set_hash`.

    Raises:
        BadInput: a file of a judge is missing.
    """
    endpoint_keys = ("base_url", "max_completion_tokens", "model", "rubric")
    endpoints = {
        f"{key}.{name}": getattr(endpoint, name)
        for key, endpoint in params.language_models().values()
        for name in endpoint_keys
    }
    config = params.evaluate
    zero_shot = config.zero_shot.model_dump() if ZERO_SHOT in config.judges else {}
    files = input_hashes(params)["judges"]  # another function of the same name is another judge
    return {
        "evaluation_hash": eval_hash,
        "evaluate.judges": params.evaluate.judges,
        **({"files of evaluate.judges": json_hash(files)[:16]} if files else {}),
        **endpoints,
        "evaluate.checkpoint_samples_per_prompt": params.evaluate.checkpoint_samples_per_prompt,
        "evaluate.samples_per_prompt": params.evaluate.samples_per_prompt,
        "evaluate.tie_margin": params.evaluate.tie_margin,
        **{f"evaluate.zero_shot.{key}": text for key, text in zero_shot.items()},
        "ppo.response_length": params.ppo.response_length,
        "ppo.temperature": params.ppo.temperature,
        "prepare.prompt_format": params.prepare.prompt_format.value,
        "seed": params.seed,
    }


def evaluation_id(settings: Settings) -> str:
    """The first 16 hex digits of a sha256 over the settings; equal for comparable evaluations."""
    return json_hash(settings)[:16]


def differences(a: Settings, b: Settings) -> list[str]:
    """The settings that differ, e.g. `ppo.temperature 1.0 and 0.7`; empty if comparable."""
    return [
        f"{key} {a.get(key)} and {b.get(key)}"
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    ]
