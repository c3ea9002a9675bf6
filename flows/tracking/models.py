"""The models of a stage for MLflow: those that it made or evaluated, and the files of those that it
made.

Files are sent after their stage, maybe by a later run, when the folder may hold another model.
DVC's cache still has them then, and a file is used only if its md5 is right.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flows.core.addresses import split_address
from flows.core.locks import digest_of, digests, read_lock
from flows.execution.dvc_stages import open_repo
from stages.lib.core.ended_rounds import params_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.params import flatten
from stages.lib.core.params.tracking import Upload
from stages.lib.core.recorder import read_metrics
from stages.lib.core.types import Row

# NaN and infinity are metrics too; pydantic would write them as null, which is no number.
ALL_NUMBERS = ConfigDict(ser_json_inf_nan="constants")
ADAPTER = "adapter_config.json"
SCORED = 8  # responses in the example of a reward model
# What the code of the models reads of params.yaml (flows/tracking/pyfunc_model.py)
SECTIONS: dict[str, Any] = {
    "seed": True,
    "model": True,
    "prepare": {"prompt_format"},
    "ppo": {"response_length", "temperature"},
    "reward": {"max_length"},
}


class ModelFile(BaseModel):
    """A file of a model, found by its md5."""

    name: str  # in the model's folder
    md5: str
    sources: list[str]  # absolute paths where it may be

    def find(self) -> Path:
        """The first source that has the file.

        Raises:
            BadInput: none has it.
        """
        for source in map(Path, self.sources):
            if source.is_file() and md5_of(source) == self.md5:
                return source
        raise BadInput(
            f"{self.sources[-1]} with md5 {self.md5} is gone from its folder and from DVC's cache, "
            "so MLflow does not get the model's files: run its stage again"
        )


class Checkpoint(BaseModel):
    """A model: base, SFT or reward model, policy or a checkpoint of it."""

    model_config = ALL_NUMBERS

    name: str
    stage: str  # base, sft, reward or ppo
    path: str  # of its weights
    digest: str  # their md5
    step: int = 0  # PPO updates
    metrics: dict[str, float] = {}
    made_by: str = ""  # the address of the stage whose run lists it; empty: that of the record
    files: list[ModelFile] = []  # that MLflow stores
    no_files: str = ""  # why there are none, if they are wanted


class ModelCode(BaseModel):
    """What MLflow's models of a stage need besides their files."""

    task: Literal["generate", "score"]
    settings: dict[str, Any]  # the sections of params.yaml that their code reads
    examples: list[Row]  # rows of their input
    sft_name: str  # the SFT model that adapters adapt, and its md5
    sft_digest: str


def md5_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among nested metrics, by flat name."""
    return {key: float(value) for key, value in flatten(values) if isinstance(value, int | float)}


def trained_models(
    address: str, metrics: Mapping[str, Any], upload: Collection[Upload]
) -> list[Checkpoint]:
    """The models that a stage made.

    Args:
        address: the stage in DVC, e.g. `ppo@r0`.
        metrics: its metrics.json.
        upload: the kinds of models whose files MLflow stores.
    """
    stage, round_ = split_address(address)
    if stage not in ("sft", "reward", "ppo"):
        return []
    folder, known = stage_dir(round_, stage), digests(round_)
    if stage == "ppo":
        policy = _model(round_, known, "ppo", folder / "policy", metrics.get("policy_update", 0))
        models = [(policy, {Upload.policy})] + [
            (
                _model(round_, known, path.name, path, update_of(path.name)),
                {Upload.checkpoints},
            )
            for path in sorted((folder / "checkpoints").glob("step_*"))
        ]
    elif stage == "reward":
        reward = _model(round_, known, "reward", folder / "model", metrics=numbers(metrics))
        models = [(reward, {Upload.reward})]
    else:
        # policies are adapters of it
        adapters = {Upload.policy, Upload.checkpoints} if params_of(round_).ppo.lora.r else set()
        models = [(_model(round_, known, "sft", folder / "model"), {Upload.sft} | adapters)]
    return [with_files(model, address) if kinds & set(upload) else model for model, kinds in models]


def with_files(model: Checkpoint, address: str) -> Checkpoint:
    """The model with its files, or with the reason why they cannot be read.

    Args:
        address: the stage whose output has the files; empty: DVC does not track them.
    """
    try:
        files = _tracked(Path(model.path), address) if address else _files_now(Path(model.path))
    except BadInput as error:
        return model.model_copy(update={"no_files": str(error)})
    return model.model_copy(update={"files": files})


def code_of(stage: str, round_: str, models: Iterable[Checkpoint]) -> ModelCode | None:
    """What the models of a stage need besides their files; None if MLflow stores no files.

    Raises:
        BadInput: the round's data is missing.
    """
    if not any(model.files for model in models):
        return None
    data = stage_dir(round_, "prepare") / "data"
    if stage == "reward":
        pairs = read_jsonl(data / "pairs_eval.jsonl")[:SCORED]
        examples = [{"prompt": row["prompt"], "response": row["chosen"]} for row in pairs]
    else:
        # All prompts of the evaluation: in other batches, products may round otherwise.
        rows = read_jsonl(data / "eval_prompts.jsonl")
        examples = [{"prompt": row["prompt"]} for row in rows]
    return ModelCode(
        task="score" if stage == "reward" else "generate",
        settings=params_of(round_).model_dump(mode="json", include=SECTIONS),
        examples=examples,
        sft_name=f"{round_}-sft",
        sft_digest=digests(round_).get(str(stage_dir(round_, "sft") / "model"), ""),
    )


def _tracked(path: Path, address: str) -> list[ModelFile]:
    """The files of an output of a stage, or of a folder in one, as dvc.lock has them.

    Raises:
        BadInput: the folder is no output of the stage, or DVC's cache lacks the list of its files.
    """
    outs = {Path(out["path"]): out["md5"] for out in read_lock(address).get("outs", [])}
    out = next((parent for parent in (path, *path.parents) if parent in outs), None)
    if out is None:
        raise BadInput(f"{path} is not in dvc.lock: run `dvc repro {address}`")
    with open_repo() as repo:
        cached = repo.cache.local.oid_to_path
    listing = Path(cached(outs[out]))
    if not listing.exists():
        raise BadInput(f"{listing} is missing: `dvc gc` removed {out} from DVC's cache")
    md5s = {out / entry["relpath"]: entry["md5"] for entry in json.loads(listing.read_bytes())}
    return [
        ModelFile(
            name=str(file.relative_to(path)),
            md5=md5,
            sources=[str(Path(cached(md5)).resolve()), str(file.resolve())],
        )
        for file, md5 in sorted(md5s.items())
        if path in file.parents
    ]


def _files_now(path: Path) -> list[ModelFile]:
    """The files of a folder that DVC does not track, with the md5s that they have now."""
    return [
        ModelFile(name=str(file.relative_to(path)), md5=md5_of(file), sources=[str(file.resolve())])
        for file in sorted(path.rglob("*"))
        if file.is_file()
    ]


def evaluated_models(round_: str, metrics: Mapping[str, Any]) -> Iterable[Checkpoint]:
    """The models in evaluate's metrics.json, with their metrics."""
    ppo, known = stage_dir(round_, "ppo"), digests(round_)
    paths = {
        "base": Path("assets/model"),
        "sft": stage_dir(round_, "sft") / "model",
        "ppo": ppo / "policy",
    }
    metrics_by_name = {name: metrics[name] for name in paths if name in metrics}
    for name, values in metrics.get("checkpoints", {}).items():
        paths[name], metrics_by_name[name] = ppo / "checkpoints" / name, values
    policy_update = 0
    if (ppo / "metrics.json").exists():
        policy_update = read_metrics(round_, "ppo").get("policy_update", 0)
    # The metrics at the top level compare the policy with SFT.
    against_sft = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    for name, values in metrics_by_name.items():
        yield _model(
            round_,
            known,
            name,
            paths[name],
            policy_update if name == "ppo" else update_of(name),
            numbers({**values, **against_sft} if name == "ppo" else values),
        )


def _model(
    round_: str,
    known: Mapping[str, str],
    name: str,
    path: Path,
    step: int = 0,
    metrics: Mapping[str, float] = {},
) -> Checkpoint:
    stage = name if name in ("base", "sft", "reward") else "ppo"
    return Checkpoint(
        name=f"{round_}-{name}",
        stage=stage,
        path=str(path),
        digest=digest_of(str(path), known),
        step=step,
        metrics=dict(metrics),
        made_by="assets" if stage == "base" else f"{stage}@{round_}",
    )


def update_of(name: str) -> int:
    """The PPO update in a checkpoint's name, `step_00009` -> 9; 0 for other names."""
    number = name.removeprefix("step_")
    return int(number) if number.isdecimal() else 0
