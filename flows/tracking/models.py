"""The models of a stage for MLflow: those that it made, with their files, and their metrics."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flows.core.addresses import split_address
from flows.core.locks import digest_of, digests
from flows.tracking.model_files import ModelContents, ModelFile, ModelFiles
from stages.lib.core.ended_rounds import params_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir
from stages.lib.core.params import flatten
from stages.lib.core.params.tracking import Upload
from stages.lib.core.recorder import read_metrics

# NaN and infinity are metrics too; pydantic would write them as null, which is no number.
ALL_NUMBERS = ConfigDict(ser_json_inf_nan="constants")


class Checkpoint(BaseModel):
    """A model: base, SFT or reward model, policy or a checkpoint of it.

    stage: which stage produced it (base, sft, reward or ppo). path: of its weights. digest: their
    md5. step: PPO updates. made_by: the address of the stage whose run lists it; empty: that of the
    record. files: what MLflow stores; None: nothing. no_files: the reason, if they are wanted.
    """

    model_config = ALL_NUMBERS

    name: str
    stage: str
    path: str
    digest: str
    step: int = 0
    metrics: dict[str, float] = {}
    made_by: str = ""
    files: ModelFiles | None = None
    no_files: str = ""


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
    folder, model = stage_dir(round_, stage), partial(_model, round_, digests(round_))
    if stage == "sft":
        kinds = {Upload.sft}
        if params_of(round_).ppo.lora.r:  # policies are adapters of it
            kinds |= {Upload.policy, Upload.checkpoints}
        models = [(model("sft", folder / "model"), bool(kinds & set(upload)))]
    elif stage == "reward":
        reward = model("reward", folder / "model", metrics=numbers(metrics))
        models = [(reward, Upload.reward in upload)]
    elif stage == "ppo":
        policy = model("ppo", folder / "policy", metrics.get("policy_update", 0))
        models = [(policy, Upload.policy in upload)] + [
            (model(path.name, path, update_of(path.name)), Upload.checkpoints in upload)
            for path in sorted((folder / "checkpoints").glob("step_*"))
        ]
    else:
        return []
    if not any(wanted for _, wanted in models):
        return [made for made, _ in models]
    contents = ModelContents(stage, round_)
    return [
        with_files(made, contents, contents.tracked) if wanted else made for made, wanted in models
    ]


def with_files(
    model: Checkpoint, contents: ModelContents, list_files: Callable[[Path], list[ModelFile]]
) -> Checkpoint:
    """The model with its files for MLflow, or with the reason why they cannot be read.

    Args:
        list_files: returns the files in the model's folder.
    """
    try:
        files = contents.of(list_files(Path(model.path)))
    except BadInput as error:
        return model.model_copy(update={"no_files": str(error)})
    return model.model_copy(update={"files": files})


def evaluated_models(round_: str, metrics: Mapping[str, Any]) -> Iterable[Checkpoint]:
    """The models in evaluate's metrics.json, with their metrics."""
    ppo, model = stage_dir(round_, "ppo"), partial(_model, round_, digests(round_))
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
        yield model(
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
