"""Upload the files of a model to its LoggedModel, as an MLflow model that loads by one line.

A LoggedModel is PENDING until all of its files are stored. Equal weights are stored once: a model
whose weights another LoggedModel has refers to that one, and an adapter refers to its SFT model.
"""

import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.models import Model, ModelSignature, infer_signature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from pandas import DataFrame
from pydantic import BaseModel

import stages
from flows.tracking.model_files import ModelFiles
from stages.lib.core.errors import BadInput

CODE = Path(__file__).with_name("pyfunc_model.py")
ROOMS = ("core", "data", "lm", "thresholds")  # of stages/lib, which CODE imports
PACKAGES = (
    *("mlflow", "torch", "transformers", "peft", "safetensors"),
    *("pydantic", "ruamel.yaml", "pandas", "Jinja2"),
)
WEIGHTS = "weights"  # subfolder of a model, as in CODE
# tags: a hash of the weights, and the id of the LoggedModel that has them
DIGEST, STORED = "weights.digest", "weights.model"


class ModelUpload(BaseModel):
    """The files of a LoggedModel that exists. name: of the model, for messages."""

    model_id: str
    name: str
    files: ModelFiles


def upload(client: MlflowClient, item: ModelUpload) -> None:
    """Store the files and make the LoggedModel READY; nothing if it is READY already.

    An interrupted upload goes on: weights that MLflow has are not sent again.

    Raises:
        BadInput: a file is gone, or the SFT model of an adapter was not uploaded; the LoggedModel
            is FAILED then.
    """
    model = client.get_logged_model(item.model_id)
    if model.status == LoggedModelStatus.READY:
        return
    try:
        stored = _store(client, model, item)
    except BadInput:
        client.finalize_logged_model(item.model_id, LoggedModelStatus.FAILED)
        raise
    note = (
        f'`model = mlflow.pyfunc.load_model("models:/{item.model_id}")`, then '
        "`model.predict(model.input_example)`"
    )
    client.set_logged_model_tags(item.model_id, {STORED: stored, MLFLOW_RUN_NOTE: note})
    client.finalize_logged_model(item.model_id, LoggedModelStatus.READY)


def _store(client: MlflowClient, model: LoggedModel, item: ModelUpload) -> str:
    """Store all files of a model; returns the id of the LoggedModel that has its weights."""
    files = item.files
    stored = find_stored(client, model.experiment_id, files.digest)
    sft = find_stored(client, model.experiment_id, files.sft_digest) if files.sft_digest else ""
    if sft is None:
        raise BadInput(f"{item.name} adapts an SFT model whose files MLflow does not have")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        mlflow_model = save(model, files, stored or "", sft, folder)
        if not stored:
            for file in files.files:
                link = folder / WEIGHTS / file.name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.find())
        paths = [path for path in folder.rglob("*") if path.is_file()]
        mlflow_model.model_size_bytes = sum(path.stat().st_size for path in paths)
        mlflow_model.save(folder / MLMODEL_FILE_NAME)
        _store_files(client, item.model_id, folder)
    return stored or item.model_id


def find_stored(client: MlflowClient, experiment: str, digest: str) -> str | None:
    """The id of the LoggedModel that has the weights with this digest."""
    query, token = f"tags.`{DIGEST}` = '{digest}'", None
    while True:
        models = client.search_logged_models([experiment], query, page_token=token)
        for model in models:
            # A model that refers to another one is no source: that one may have been deleted since.
            if model.tags.get(STORED) == model.model_id and model.status == LoggedModelStatus.READY:
                return str(model.model_id)
        token = models.token
        if not token:
            return None


def save(
    model: LoggedModel, files: ModelFiles, weights_model: str, sft_model: str, folder: Path
) -> Model:
    """Write an MLflow model to a new folder, all but its weights; returns its description.

    Args:
        model: the LoggedModel that it belongs to.
        files: what it consists of.
        weights_model: the LoggedModel that has its weights; empty: the model itself.
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
        code, source = Path(temporary, "stages"), Path(stages.__file__).parent
        for room in ROOMS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / "lib" / room, code / "lib" / room, ignore=ignored)
        for package in ("__init__.py", "lib/__init__.py"):
            shutil.copy(source / package, code / package)
        mlflow.pyfunc.save_model(
            folder,
            python_model=str(CODE),
            code_paths=[str(code)],
            signature=signature(files),
            input_example=DataFrame(files.examples),
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES],
            model_config={
                "task": files.task,
                "weights_model": weights_model,
                "sft_model": sft_model,
                **files.settings,
            },
            mlflow_model=mlflow_model,
        )
    return mlflow_model


def signature(files: ModelFiles) -> ModelSignature:
    """Columns and types of input and output, and the settings of sampling with their values."""
    if files.task == "score":
        return infer_signature(DataFrame(files.examples), [0.5])
    settings = files.settings
    sampling: dict[str, Any] = {
        "max_new_tokens": settings["ppo"]["response_length"],
        "temperature": settings["ppo"]["temperature"],
        "seed": settings["seed"] * 1000,  # that of the evaluation's first sample
    }
    return infer_signature(DataFrame(files.examples), ["a text"], params=sampling)


def _store_files(client: MlflowClient, model_id: str, folder: Path) -> None:
    """Store the weights that MLflow lacks, then all other files; MLmodel is the last one."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (path.name == MLMODEL_FILE_NAME, WEIGHTS not in path.parts, path))
    sizes: dict[Path, dict[str, int | None]] = {}
    for path in files:
        parent = path.parent.relative_to(folder)
        artifact_path = None if parent == Path() else parent.as_posix()
        if parent not in sizes and WEIGHTS in parent.parts:
            sizes[parent] = _stored_sizes(client, model_id, parent)
        if sizes.get(parent, {}).get(path.name) != path.stat().st_size:
            client.log_model_artifact(model_id, str(path), artifact_path)


def _stored_sizes(client: MlflowClient, model_id: str, folder: Path) -> dict[str, int | None]:
    """Size in bytes of each file that the LoggedModel has in a folder."""
    stored = client.list_logged_model_artifacts(model_id, folder.as_posix())
    return {Path(file.path).name: file.file_size for file in stored}
