"""Upload the files of a model to its LoggedModel, as an MLflow model that loads by one line.

A LoggedModel is PENDING until all of its files are stored. An adapter refers to the LoggedModel of
its SFT model.
"""

import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.models import Model, ModelSignature, infer_signature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from pandas import DataFrame

import stages
from flows.tracking.mlflow_store import MlflowStore
from flows.tracking.models import ADAPTER, Checkpoint, ModelCode
from stages.lib.core.errors import BadInput

CODE = Path(__file__).with_name("pyfunc_model.py")
ROOMS = ("core", "data", "lm", "thresholds")  # of stages/lib, which CODE imports
PACKAGES = (
    *("mlflow", "torch", "transformers", "peft", "safetensors"),
    *("pydantic", "ruamel.yaml", "pandas", "Jinja2"),
)
WEIGHTS = "weights"  # subfolder of a model, as in CODE


def upload(store: MlflowStore, model: LoggedModel, checkpoint: Checkpoint, code: ModelCode) -> None:
    """Store the files of a model, and make its LoggedModel READY.

    Raises:
        BadInput: a file is gone, or MLflow does not have the SFT model of an adapter; the
            LoggedModel is FAILED then.
    """
    client, model_id = store.client, model.model_id
    try:
        is_adapter = any(file.name == ADAPTER for file in checkpoint.files)
        sft = store.sft_model(code.sft_name, code.sft_digest) if is_adapter else ""
        with TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            save(model, checkpoint, code, sft, folder)
            client.log_model_artifacts(model_id, str(folder))
    except BadInput as error:
        client.set_logged_model_tags(model_id, {MLFLOW_RUN_NOTE: f"No files: {error}"})
        client.finalize_logged_model(model_id, LoggedModelStatus.FAILED)
        raise BadInput(f"MLflow does not get the files of {checkpoint.name}: {error}") from None
    note = (
        f'`model = mlflow.pyfunc.load_model("models:/{model_id}")`, then '
        "`model.predict(model.input_example)`"
    )
    client.set_logged_model_tags(model_id, {MLFLOW_RUN_NOTE: note})
    client.finalize_logged_model(model_id, LoggedModelStatus.READY)


def save(
    model: LoggedModel, checkpoint: Checkpoint, code: ModelCode, sft_model: str, folder: Path
) -> None:
    """Write an MLflow model to a new folder, with links to its weights.

    Args:
        model: the LoggedModel that it belongs to.
        sft_model: the LoggedModel with the weights that it adapts; empty: none.
        folder: does not exist yet.
    """
    mlflow_model = Model(
        artifact_path=model.artifact_location,
        model_uuid=model.model_id,
        model_id=model.model_id,
        run_id=model.source_run_id,
    )
    with TemporaryDirectory() as temporary:
        copy, source = Path(temporary, "stages"), Path(stages.__file__).parent
        for room in ROOMS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / "lib" / room, copy / "lib" / room, ignore=ignored)
        for package in ("__init__.py", "lib/__init__.py"):
            shutil.copy(source / package, copy / package)
        mlflow.pyfunc.save_model(
            folder,
            python_model=str(CODE),
            code_paths=[str(copy)],
            signature=signature(code),
            input_example=DataFrame(code.examples),
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES],
            model_config={"task": code.task, "sft_model": sft_model, **code.settings},
            mlflow_model=mlflow_model,
        )
    for file in checkpoint.files:
        link = folder / WEIGHTS / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.find())
    files = [path for path in folder.rglob("*") if path.is_file()]
    mlflow_model.model_size_bytes = sum(path.stat().st_size for path in files)
    mlflow_model.save(folder / MLMODEL_FILE_NAME)


def signature(code: ModelCode) -> ModelSignature:
    """Columns and types of input and output, and the settings of sampling with their values."""
    if code.task == "score":
        return infer_signature(DataFrame(code.examples), [0.5])
    settings = code.settings
    sampling: dict[str, Any] = {
        "max_new_tokens": settings["ppo"]["response_length"],
        "temperature": settings["ppo"]["temperature"],
        "seed": settings["seed"] * 1000,  # that of the evaluation's first sample
    }
    return infer_signature(DataFrame(code.examples), ["a text"], params=sampling)
