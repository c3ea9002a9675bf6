"""What `--preset`, `--set` and `--rounds` (or the form in the Prefect UI) make of params.yaml.

The defaults are those of `stages.params.Params`; the params.yaml that is committed equals them. A
preset is an overlay on the defaults, never on what an earlier run left behind; without one,
params.yaml stays as it is but for what is set.
"""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir, write_text
from stages.lib.core.params import PARAMS_FILE, Params, check_params, flatten, load_params
from stages.lib.core.params.data import AssetsParams, PrepareParams, rounds
from stages.lib.core.params.evaluation import (
    BatteryParams,
    CapabilityParams,
    EvaluateParams,
    ReplayParams,
)
from stages.lib.core.params.gates import GatesParams
from stages.lib.core.params.judging import AnnotateParams
from stages.lib.core.params.policy import (
    Algorithm,
    BestOfNParams,
    DpoParams,
    GrpoParams,
    PpoParams,
    RlooParams,
)
from stages.lib.core.params.shared import ModelParams, ParamsSection
from stages.lib.core.params.training import RewardParams, SftParams
from stages.ppo.common.reward_files import reward_source_files
from stages.replay.badcases import report_path

PRESETS = Path(__file__).parents[2] / "presets"
KEEP, DEFAULT = "keep", "default"
WHOLE = ("rubric", "endpoints")  # mappings of the user's own names


class Sections(ParamsSection):
    """Sections of params.yaml for a form; what is not set stays as the preset or params.yaml has
    it.
    """

    seed: int | None = None
    assets: AssetsParams | None = None
    prepare: PrepareParams | None = None
    model: ModelParams | None = None
    sft: SftParams | None = None
    annotate: AnnotateParams | None = None
    reward: RewardParams | None = None
    algorithm: Algorithm | None = None
    ppo: PpoParams | None = None
    dpo: DpoParams | None = None
    best_of_n: BestOfNParams | None = None
    rloo: RlooParams | None = None
    grpo: GrpoParams | None = None
    evaluate: EvaluateParams | None = None
    capability: CapabilityParams | None = None
    replay: ReplayParams | None = None
    battery: BatteryParams | None = None
    gates: GatesParams | None = None


def preset_names() -> list[str]:
    return [KEEP, DEFAULT, *sorted(path.stem for path in PRESETS.glob("*.yaml"))]


def read_preset(name: str) -> dict[str, Any]:
    """The overlay of a preset.

    Raises:
        BadInput: there is none of that name, or it is not YAML.
    """
    path = PRESETS / f"{name}.yaml"
    if name not in preset_names():
        raise BadInput(f"--preset {name}: no such preset; there are {', '.join(preset_names())}")
    try:
        return {} if name == DEFAULT else yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not YAML: {error}") from None


def overlay(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top`, mapping by mapping; lists, scalars and mappings of the
    user's own names are replaced.
    """
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = (
            overlay(below, value)
            if isinstance(value, Mapping) and isinstance(below, dict) and key not in WHOLE
            else value
        )
    return merged


def parse_setting(text: str) -> dict[str, Any]:
    """`sft.lora.r=8` -> `{"sft": {"lora": {"r": 8}}}`; the value is YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {text}: expected section.key=value, e.g. ppo.total_episodes=64")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise BadInput(f"--set {text}: {value!r} is not a YAML value") from None
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return dict(nested)


def resolve(
    preset: str = KEEP,
    number: int | None = None,
    settings: Iterable[str] = (),
    sections: BaseModel | None = None,
) -> Params:
    """The params that a run asks for, checked; nothing is written.

    Raises:
        BadInput: an unknown preset or key, a value out of range, a reward of PPO that is not there.
    """
    current = load_params() if preset == KEEP else Params()
    values = current.model_dump(mode="json")
    if preset != KEEP:
        chosen = read_preset(preset)
        values = overlay(values, chosen)
        values["rounds"] = chosen.get(
            "rounds", values["rounds"]
        )  # a preset's rounds are all rounds
    if sections is not None:
        given = sections.model_dump(mode="json", exclude_unset=True)
        values = overlay(values, {key: value for key, value in given.items() if value is not None})
    for setting in settings:
        values = overlay(values, parse_setting(setting))
    if number is not None:
        if number < 1:
            raise BadInput(f"--rounds {number}: expected at least 1")
        values["rounds"] = {name: entry.model_dump() for name, entry in rounds(number).items()}
    params = check_params(
        values, f"preset {preset} with --set" if preset != KEEP else "params.yaml with --set"
    )
    reward_source_files(params)  # raises where one is not there
    return params


def one_more_round() -> int:
    """How many rounds there are with one more; none more where the last one has not come to its
    replay, which the next one needs.

    Raises:
        BadInput: the rounds of params.yaml are not r0, r1, ..., each after the one before.
    """
    named = load_params().rounds
    if named != rounds(len(named)):
        raise BadInput(
            f"rounds of params.yaml are {', '.join(named)}, not r0, r1, ...: add the next one there, with its `previous`"
        )
    return len(named) + (stage_dir(list(named)[-1], "replay") / "metrics.json").exists()


def write_params(params: Params, path: Path = PARAMS_FILE) -> list[str]:
    """Write what differs into params.yaml, whose comments and order stay; returns the changes,
    `ppo.gamma 1.0 -> 0.9`.
    """
    document, values = _yaml().load(path.read_text()) or {}, params.model_dump(mode="json")
    before, after = dict(flatten(document, separator=".")), dict(flatten(values, separator="."))
    differing = [key for key, value in after.items() if key not in before or before[key] != value]
    changes = [f"{key} {_shown(before.get(key))} -> {_shown(after[key])}" for key in differing]
    gone = [f"{key} removed" for key in before if key not in after]
    if changes or gone:
        _assign(document, values)
        text = io.StringIO()
        _yaml().dump(document, text)
        check_params(yaml.safe_load(text.getvalue()), str(path))
        write_text(path, text.getvalue())
    for file in map(
        report_path, params.rounds
    ):  # DVC wants what a stage depends on, with nothing in it too
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return changes + gone


def _assign(document: Any, values: Mapping[str, Any]) -> None:
    for key in [key for key in document if key not in values]:
        del document[key]
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(document.get(key), Mapping):
            _assign(document[key], value)
        elif key not in document or document[key] != value:
            document[key] = value


class _Representer(RoundTripRepresenter):
    def represent_null(self, _: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(type(None), _Representer.represent_null)


def _yaml() -> YAML:
    """Keeps comments; writes null as `null`."""
    rules = YAML()
    rules.Representer = _Representer
    rules.width = 200
    rules.indent(mapping=2, sequence=4, offset=2)
    return rules


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
