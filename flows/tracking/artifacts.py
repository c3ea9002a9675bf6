"""MLflow's artifacts without its server: the plugin for addresses `mlflow-artifacts:/...`.

pyproject.toml registers it (entry point `mlflow.artifact_repository`), so that every program in
this environment can load models from `.rondo/mlflow.db`. It imports nothing of `stages`: a model
from MLflow brings its own.
"""

from pathlib import Path
from urllib.parse import urlsplit

import mlflow
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
from sqlalchemy.engine import make_url

FOLDER = "mlartifacts"  # beside the database, as `rondo up` starts MLflow (flows/core/services.py)


def repository(
    artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
) -> ArtifactRepository:
    """The server's artifacts; without the server, the folder in which it keeps them."""
    uri = tracking_uri or mlflow.get_tracking_uri()
    if not uri.startswith("sqlite:///"):
        return MlflowArtifactsRepository(artifact_uri, tracking_uri, registry_uri)
    folder = Path(make_url(uri).database or "").resolve().parent / FOLDER
    return LocalArtifactRepository((folder / urlsplit(artifact_uri).path.lstrip("/")).as_uri())
