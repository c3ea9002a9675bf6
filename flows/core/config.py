"""Resolve the params of a run from params.yaml, a preset and single settings, and write them back.

The sources are `--preset`, `--set` and `--rounds`, or the form in the Prefect UI. The defaults are
those of `stages.lib.core.params.Params`; the committed params.yaml equals them. A preset is an
overlay on the defaults, never on the params of an earlier run. Without a preset, only the settings
of the run change params.yaml.
"""

import io
import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir, write_text
from stages.lib.core.params import PARAMS_FILE, Params, check_params, flatten, load_params
from stages.lib.core.params.data import START, rounds
from stages.lib.core.params.shared import ParamsSection
from stages.lib.core.reading import parse_yaml, read_yaml
from stages.lib.core.user_inputs import user_files
from stages.lib.data.lengths import check_lengths
from stages.replay.badcases import report_path

PRESETS = Path(__file__).parents[2] / "presets"
KEEP, DEFAULT = "keep", "default"
ALL = "all"  # rounds that run again
# Mappings whose keys are the user's own names: merging them would keep entries that the user left
# out, so an overlay replaces them.
REPLACED_WHOLE = ("rubric", "endpoints", "engine_options")


def preset_names() -> list[str]:
    """Valid values of `--preset`: `keep`, `default` and the files of presets/."""
    return [KEEP, DEFAULT, *sorted(path.stem for path in PRESETS.glob("*.yaml"))]


def describe_presets() -> str:
    """What the heads of the preset files say of minutes, machines and downloads, in Markdown."""
    lines = [
        f"An overlay on the defaults. `{KEEP}`: params.yaml as it is; `{DEFAULT}`: the defaults."
    ]
    for path in sorted(PRESETS.glob("*.yaml")):
        head = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
        lines.append(f"- `{path.stem}`: {' '.join(line.strip('# ') for line in head)}")
    return "\n\n".join(lines)  # Prefect's form joins lines that no empty line divides


def read_preset(name: str) -> dict[str, Any]:
    """The values that a preset overlays on the defaults.

    Raises:
        BadInput: no preset has this name, or its file is not YAML.
    """
    path = PRESETS / f"{name}.yaml"
    if name not in preset_names():
        known = ", ".join(preset_names())
        raise BadInput(f"--preset {name}: no such preset; expected one of {known}")
    if name == DEFAULT:
        return {}
    values = read_yaml(path, f"correct it, or restore it, e.g. with `git checkout {path}`")
    if not isinstance(values or {}, Mapping):
        raise BadInput(f"{path}: expected sections of params.yaml, got {values!r:.60}")
    return dict(values or {})


def settable_keys(section: type[ParamsSection] = Params) -> list[str]:
    """The keys of a section that `--set` may name, with those of its own sections.

    Example:
        >>> [key for key in settable_keys() if key.startswith("mlflow")]
        ['mlflow.upload']
    """
    keys = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ParamsSection):
            keys += [f"{name}.{key}" for key in settable_keys(field.annotation)]
        else:
            keys.append(name)
    return keys


def overlay(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `top` into a copy of `base`, recursively.

    Lists, scalars and the mappings in REPLACED_WHOLE are replaced, not merged.
    """
    merged = dict(base)
    for key, value in top.items():
        current = merged.get(key)
        merge = isinstance(value, Mapping) and key not in REPLACED_WHOLE
        merged[key] = overlay(current, value) if merge and isinstance(current, dict) else value
    return merged


def parse_setting(text: str) -> dict[str, Any]:
    """Parse a `--set` argument: `sft.lora.r=8` -> `{"sft": {"lora": {"r": 8}}}`; values are YAML.

    Raises:
        BadInput: the text has no `=`, no key, or its value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {text:.200}: expected section.key=value, e.g. ppo.total_episodes=64")
    try:
        parsed = parse_yaml(value)
    except ValueError as error:
        shown = f"--set {text:.200}: {value!r:.200}"
        raise BadInput(f"{shown} is not a YAML value: {error}") from None
    return nest(key.strip(), parsed)


def nest(key: str, value: Any) -> dict[str, Any]:
    """
    Example:
        >>> nest("sft.lora.r", 8)
        {'sft': {'lora': {'r': 8}}}
    """
    head, _, rest = key.partition(".")
    return {head: nest(rest, value) if rest else value}


def with_settings(values: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The values with those of `--set` arguments."""
    for setting in settings:
        values = overlay(values, parse_setting(setting))
    return values


def resolve_anywhere(settings: Iterable[str]) -> Params:
    """The params of a command that needs no project: those of params.yaml if there is one, else the
    defaults, with single values. Files that they name need not exist.

    Raises:
        BadInput: an unknown key, or a value out of range.
    """
    start = load_params() if PARAMS_FILE.exists() else Params()
    return check_params(with_settings(start.model_dump(mode="json"), settings), "--set")


def resolve(
    preset: str = KEEP,
    number: int | None = None,
    settings: Iterable[str] = (),
) -> Params:
    """Resolve and validate the params of a run; nothing is written.

    Later arguments override earlier ones: preset, settings; `number` sets the rounds.

    Args:
        preset: `keep` starts from params.yaml, any other name from the defaults.
        number: how many rounds, named r0, r1, ...; None keeps the rounds of the preset or file.
        settings: single values, `section.key=value`.

    Raises:
        BadInput: an unknown preset or key, a value out of range, lengths that do not fit together,
            prepare.sources that nothing reads, or a missing model, function or earlier round.

    Example:
        >>> resolve("smoke", 1, ["ppo.kl_coef=0.1"]).ppo.kl_coef
        0.1
    """
    start = load_params() if preset == KEEP else Params()
    values = start.model_dump(mode="json")
    if preset != KEEP:
        preset_values = read_preset(preset)
        values = overlay(values, preset_values)
        # `rounds` of a preset are complete: merging would keep the default's further rounds.
        values["rounds"] = preset_values.get("rounds", values["rounds"])
    values = with_settings(values, settings)
    source = f"{'params.yaml' if preset == KEEP else f'preset {preset}'} with --set"
    check_params(values, source)  # also of the rounds that `number` replaces
    if number is not None:
        if number < 1:
            raise BadInput(f"--rounds {number}: expected at least 1")
        values["rounds"] = {name: entry.model_dump() for name, entry in rounds(number).items()}
    params = check_params(values, source)
    for name, entry in params.rounds.items():
        if entry.previous not in (START, *(f"rounds/{key}" for key in params.rounds)):
            raise BadInput(f"rounds.{name}.previous is {entry.previous}: there is no such round")
    user_files(params)  # raises if a model or function is missing
    if params.prepare.sources and params.assets.data != "files":
        raise BadInput(
            f"prepare.sources: nothing reads it, since assets.data is {params.assets.data}; "
            "add --set assets.data=files, or else --set prepare.sources=[]"
        )
    check_lengths(params)
    return params


def options_of(params: Params) -> list[str]:
    """The options of `rondo run` that give these params: the preset that differs least from them,
    and what differs.
    """
    preset, changes = nearest_preset(params)
    settings = (f"{key}={_yaml_text(value)}" for key, value in changes)
    options = ["--preset", preset, "--rounds", str(len(params.rounds))]
    return [*options, *(word for setting in settings for word in ("--set", setting))]


def nearest_preset(params: Params, named: str = KEEP) -> tuple[str, list[tuple[str, Any]]]:
    """The named preset, for `keep` the one that differs least from these params; and the keys,
    rounds excepted, that differ from it, with their values in the params.
    """
    default, wanted = Params().model_dump(mode="json"), params.model_dump(mode="json")
    choices = []
    # `keep` itself depends on params.yaml
    for name in preset_names()[1:] if named == KEEP else [named]:
        values = overlay(default, read_preset(name))
        differing = _settings(values, wanted)
        changes = [change for change in differing if change[0].partition(".")[0] != "rounds"]
        choices.append((len(changes), name != DEFAULT, name, changes))
    _, _, preset, changes = min(choices)
    return preset, changes


def _yaml_text(value: Any) -> str:
    """A value as YAML in one line; a text without quotes if it is read as the same text."""
    plain = isinstance(value, str) and re.fullmatch(r"[a-z][\w/.-]*", value)
    return value if plain and parse_yaml(value) == value else json.dumps(value, ensure_ascii=False)


def _settings(
    before: Mapping[str, Any], after: Mapping[str, Any], parent: str = ""
) -> list[tuple[str, Any]]:
    """The keys, as `--set` takes them, whose values differ, and the new values."""
    changes = []
    for key, value in after.items():
        old, path = before.get(key), f"{parent}{key}"
        if isinstance(value, Mapping) and isinstance(old, Mapping) and key not in REPLACED_WHOLE:
            changes += _settings(old, value, f"{path}.")
        elif old != value:
            changes.append((path, value))
    return changes


def check_rerun(rerun: Collection[str]) -> None:
    """Check the rounds that a run shall run again.

    Raises:
        BadInput: the project has no such round.
    """
    known = [*load_params().rounds, ALL] if rerun else []
    for name in rerun:
        if name not in known:
            raise BadInput(f"--rerun {name}: no such round; expected one of {', '.join(known)}")


def one_more_round() -> int:
    """The number of rounds after adding one.

    If the last round has no replay results yet, no round is added, because the next round needs
    them.

    Raises:
        BadInput: the rounds of params.yaml are not r0, r1, ..., each based on the one before.
    """
    current = load_params().rounds
    if current != rounds(len(current)):
        raise BadInput(
            f"rounds of params.yaml are {', '.join(current)}, not r0, r1, ...: "
            "add the next round to params.yaml, with its `previous`"
        )
    return len(current) + (stage_dir(list(current)[-1], "replay") / "metrics.json").exists()


def write_params(params: Params, path: Path = PARAMS_FILE) -> list[str]:
    """Write the changed values into params.yaml; its comments and key order stay.

    Returns:
        One line per change: `ppo.gamma 1.0 -> 0.9`, or `key removed`.
    """
    document, values = _yaml().load(path.read_text("utf-8")) or {}, params.model_dump(mode="json")
    changes = _changes(document, values)
    if changes:
        _assign(document, values)
        if list(document["rounds"]) != list(values["rounds"]):  # each after its predecessor
            document["rounds"] = values["rounds"]
        text = io.StringIO()
        _yaml().dump(document, text)
        check_params(parse_yaml(text.getvalue()), str(path))
        write_text(path, text.getvalue())
    # DVC fails if a dependency is missing, so each round gets its badcase file, even an empty one.
    for file in map(report_path, params.rounds):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return changes


def changes_of_params(params: Params, path: Path = PARAMS_FILE) -> list[str]:
    """The lines that `write_params` would return; nothing is written."""
    return _changes(_yaml().load(path.read_text("utf-8")) or {}, params.model_dump(mode="json"))


def _changes(document: Any, values: Mapping[str, Any]) -> list[str]:
    before, after = dict(flatten(document, separator=".")), dict(flatten(values, separator="."))
    differing = [key for key, value in after.items() if key not in before or before[key] != value]
    changes = [f"{key} {_format(before.get(key))} -> {_format(after[key])}" for key in differing]
    return changes + [f"{key} removed" for key in before if key not in after]


def _assign(document: Any, values: Mapping[str, Any]) -> None:
    """Make `document` equal to `values`; equal entries are not assigned, so their comments stay."""
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
    """A YAML reader and writer that keeps comments and writes null as `null`."""
    round_trip = YAML()
    round_trip.Representer = _Representer
    round_trip.width = 200
    round_trip.indent(mapping=2, sequence=4, offset=2)
    return round_trip


def _format(value: Any) -> str:
    return "null" if value is None else str(value)
