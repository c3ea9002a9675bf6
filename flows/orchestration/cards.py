"""The artifacts of a flow run in Prefect, one per key: what is shown again replaces what the run
showed before, so that neither an update nor *Retry* leaves an old version on the run's page.
"""

from collections.abc import Collection
from uuid import UUID

from prefect import get_client
from prefect.artifacts import Artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.runtime import flow_run

from flows.core.services import prefect_pages


def show(artifact: Artifact) -> None:
    """Create the artifact, or replace the run's artifact with its key."""
    with get_client(sync_client=True) as client:
        ids = _ids(client, [str(artifact.key)])
        if ids:
            update = ArtifactUpdate(data=artifact.format(), description=artifact.description)
            client.update_artifact(ids[str(artifact.key)], update)
        else:
            artifact.create()


def remove(*keys: str) -> None:
    """Remove the run's artifacts with these keys; one that is not there is none."""
    with get_client(sync_client=True) as client:
        for artifact in _ids(client, keys).values():
            client.delete_artifact(artifact)


def links(keys: Collection[str]) -> list[str]:
    """Links to the run's artifacts with these keys, in this order, in Markdown."""
    with get_client(sync_client=True) as client:
        ids = _ids(client, keys)
    page = f"{prefect_pages()}/artifacts/artifact"
    return [f"[{key}]({page}/{ids[key]})" for key in keys if key in ids]


def _ids(client: SyncPrefectClient, keys: Collection[str]) -> dict[str, UUID]:
    of_run = {"key": {"any_": list(keys)}, "flow_run_id": {"any_": [flow_run.id]}}
    artifacts = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(of_run))
    return {str(artifact.key): artifact.id for artifact in artifacts}
