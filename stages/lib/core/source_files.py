"""Hashes of the user's data files, to see that one has changed."""

from pathlib import Path

from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, file_hash, read_json
from stages.lib.core.params import Params


def source_hashes(params: Params) -> list[dict[str, str | None]]:
    """Path and sha256 of each of prepare.sources; null for a hub id, which prepare loads."""
    if not params.prepare.sources:
        raise BadInput(
            "assets.data is `files` but prepare.sources is empty: list your JSONL or Parquet files there"
        )
    paths = [Path(source.path) for source in params.prepare.sources]
    return [
        {"path": str(path), "sha256": file_hash(path) if path.is_file() else None} for path in paths
    ]


def changed_sources(params: Params) -> list[str]:
    """Those of the user's files that are others than when the assets stage recorded them: DVC knows
    them by name alone.

    Raises:
        BadInput: the assets stage has recorded none.
    """
    if params.assets.data != "files":
        return []
    recorded = {
        row["path"]: row["sha256"]
        for row in read_json(ASSETS / "data/sources.json", "dvc repro assets")
    }
    return [
        path
        for path, sha256 in recorded.items()
        if sha256 and Path(path).is_file() and file_hash(Path(path)) != sha256
    ]
