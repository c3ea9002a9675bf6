"""A pipeline run that is tracked, for the tests of what MLflow gets."""

from collections.abc import Collection, Mapping
from pathlib import Path

from mlflow import MlflowClient

from flows.execution.meter import Meter
from flows.tracking.mlflow_tracker import MlflowTracker
from stages.lib.core.params.tracking import Upload


def track(
    uri: str,
    folder: Path,
    *addresses: str,
    run: str = "run",
    outcome: str = "failed",
    tags: Mapping[str, str] = {},
    upload: Collection[Upload] = (),
) -> list[str]:
    """Track a run with these stages, which ended so; returns the messages."""
    messages: list[str] = []
    tracker = MlflowTracker(run, uri, folder / ".rondo", tags, messages.append, upload)
    tracker.begin()
    for address in addresses:
        tracker.start(address, Meter())
        tracker.finish(outcome)
    tracker.close("FAILED" if outcome == "failed" else "FINISHED", {})
    return messages


def states(database: str) -> dict[str, str]:
    """The status of each run, by its name."""
    return {run.info.run_name: run.info.status for run in MlflowClient(database).search_runs(["1"])}
