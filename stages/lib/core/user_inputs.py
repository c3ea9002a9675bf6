"""The user's own files that params.yaml names: data, models and scoring functions.

dvc.yaml cannot list paths of params.yaml as dependencies. So the stage `inputs`, which DVC runs
every time, writes the hashes of these files to assets/inputs/<kind>.json, and the stages that read
the files depend on that. Kinds: `data` (prepare.sources), `model` (assets.model), `rewards`
(ppo.rewards), `judges` (evaluate.judges), `primary_judge` (the first of them), `constitution`
(annotate.constitution), `sft_model`, `reward_model` and `policy` (sft.model, reward.model and
ppo.model) and `engine` (ppo.engine): the code that only a run with an engine executes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from stages.lib.core.constitution import read_principles
from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, ROUNDS, WORK, file_hash, write_json
from stages.lib.core.hub import is_of_hub
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import BUILT_IN_JUDGES, ZERO_SHOT
from stages.lib.core.params.policy import Engine
from stages.lib.core.user_functions import function_files
from stages.lib.core.validation import read_json_as

INPUTS = ASSETS / "inputs"
HASHES = WORK / "input_hashes.json"  # of unchanged files, so that large files are read once

PRIMARY_JUDGE = "evaluate.judges[0]"
ENGINE_CODE = Path("stages/ppo/engines")  # .dvcignore hides it from the other runs
VERDICT_SETTINGS = ("base_url", "model", "rubric", "max_completion_tokens")

Hashes = dict[str, str | None]  # sha256 by path; None: no file or folder here, e.g. a hub id
# by path: size, times of change in nanoseconds, inode and sha256
Known = dict[str, tuple[int, int, int, int, str]]


def user_files(params: Params) -> dict[str, list[Path]]:
    """Files and folders by kind.

    Raises:
        BadInput: there are no prepare.sources, a model or function does not exist, or the
            constitution has no principle.
    """
    data = [Path(source.path) for source in params.prepare.sources]
    if params.assets.data != "files":
        data = []
    elif not data:
        raise BadInput(
            "assets.data is `files` but prepare.sources is empty: list your files "
            "there, e.g. --set 'prepare.sources=[{path: pairs.jsonl}]'"
        )
    model, rewards = Path(params.assets.model).expanduser(), list[Path]()
    for source in params.ppo.rewards:
        key = f"ppo.rewards {source.name}"
        if source.model:
            rewards += _model_folders(source.model, key)
        if source.function:
            rewards += function_files(source.function, key)
    given = {
        "sft_model": ("sft.model", params.sft.model),
        "reward_model": ("reward.model", params.reward.model),
        "policy": ("ppo.model", params.ppo.model),
    }
    by_judge = {named: _judge_files(named, params) for named in params.evaluate.judges}
    return {
        "data": data,
        "model": [model] if model.is_dir() else [],
        "rewards": rewards,
        "judges": [path for paths in by_judge.values() for path in paths],
        "primary_judge": by_judge[params.evaluate.judges[0]],
        "constitution": _constitution(params),
        **{
            kind: _model_folders(named, key) if named else []
            for kind, (key, named) in given.items()
        },
        "engine": [] if params.ppo.engine is Engine.local else engine_code(),
    }


def engine_code(root: Path = Path()) -> list[Path]:
    """The files that only a run with an engine executes, relative to the project's folder."""
    return sorted(path.relative_to(root) for path in (root / ENGINE_CODE).glob("*.py"))


def _constitution(params: Params) -> list[Path]:
    if params.annotate.constitution is None:
        return []
    path = Path(params.annotate.constitution)
    read_principles(path)  # an empty file is an error before the first stage runs
    return [path]


def _judge_files(named: str, params: Params) -> list[Path]:
    if named in BUILT_IN_JUDGES or named in params.language_models():
        return []
    if ":" in named:
        return function_files(named, "evaluate.judges")
    judges = ", ".join([*BUILT_IN_JUDGES, *params.language_models()])
    return _model_folders(named, "evaluate.judges", f"name one of {judges}, or")


def _primary_judge(params: Params) -> str:
    """The settings of the first judge, on which its verdicts depend."""
    named = params.evaluate.judges[0]
    settings: dict[str, object] = {"judge": named, "tie_margin": params.evaluate.tie_margin}
    if named == ZERO_SHOT:
        settings[ZERO_SHOT] = params.evaluate.zero_shot.model_dump()
    if named in params.language_models():
        _, endpoint = params.language_models()[named]
        settings["endpoint"] = endpoint.model_dump(include=set(VERDICT_SETTINGS))
    return json.dumps(settings, sort_keys=True)


def _model_folders(named: str, key: str, advice: str = "name") -> list[Path]:
    """The folder of a model; none of one of the hub, whose revision params.yaml has."""
    if is_of_hub(named):
        return []
    if Path(named).parts[:1] == (ROUNDS.name,):
        raise BadInput(
            f"{key}: {named} is an output of the pipeline, and a run may change it: "
            "copy it to another folder, e.g. models/, and name the copy"
        )
    folder = Path(named).expanduser()
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise BadInput(
            f"{key}: no model in {named}; {advice} a folder that has a config.json, or a model of "
            "the hub with its commit, org/name@COMMIT"
        )
    return [folder]


def input_hashes(params: Params) -> dict[str, Hashes]:
    """The hashes of all files, by kind; files whose time and size did not change are not read.

    `primary_judge` also has the judge's settings, under PRIMARY_JUDGE: the stages that depend on
    it do not run again if another judge is added or removed.

    Raises:
        BadInput: as `user_files`.
    """
    known = read_json_as(Known, HASHES, f"rm {HASHES}") if HASHES.exists() else {}
    read: Known = {}

    def sha256(file: Path) -> str:
        path, status = str(file), file.stat()
        if path in read:  # it has several kinds
            return read[path][-1]
        # ctime changes with the content, even if a program sets mtime back
        state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        *known_state, digest = known.get(path, (None,))
        is_known = digest is not None and tuple(known_state) == state
        read[path] = (*state, str(digest) if is_known else file_hash(file))
        return read[path][-1]

    hashes = {
        kind: {
            str(file): sha256(file) if file.is_file() else None
            for path in paths
            for file in _files_in(path)
        }
        for kind, paths in user_files(params).items()
    }
    hashes["primary_judge"][PRIMARY_JUDGE] = _primary_judge(params)
    if read != known:
        write_json(HASHES, read)
    return hashes


def _files_in(path: Path) -> Iterator[Path]:
    """The files of a folder, or the path itself if it is no folder."""
    if path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file())
    else:
        yield path


def recorded_hashes(kind: str) -> Hashes | None:
    """The hashes that the stage `inputs` wrote; None if it never ran."""
    path = INPUTS / f"{kind}.json"
    return read_json_as(Hashes, path) if path.exists() else None


def are_recorded(hashes: dict[str, Hashes]) -> bool:
    """Whether the stage `inputs` wrote these hashes, by kind, when it last ran."""
    return all(recorded_hashes(kind) == now for kind, now in hashes.items())


def check_unchanged(kind: str, params: Params) -> None:
    """Check that the files are still those on which DVC based its decision to run a stage.

    Raises:
        BadInput: one of them has changed since; it is named.
    """
    recorded, now = recorded_hashes(kind), input_hashes(params)[kind]
    if recorded is None and now:
        raise BadInput(f"{INPUTS / kind}.json is missing: run `dvc repro inputs`")
    if changed := differing(recorded or {}, now):
        raise BadInput(
            f"{', '.join(changed)} changed after the run began: start `rondo run` or `dvc repro` "
            "again, which runs the stages that read it"
        )


def differing(before: Hashes, after: Hashes) -> list[str]:
    """The paths that were added, removed or changed."""
    return sorted(
        path
        for path in {*before, *after}
        if (path in before, before.get(path)) != (path in after, after.get(path))
    )
