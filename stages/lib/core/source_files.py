"""Hashes of the user's data files, to detect a change that DVC cannot see."""

from pathlib import Path

from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, file_hash, read_json
from stages.lib.core.params import Params


def source_hashes(params: Params) -> list[dict[str, str | None]]:
    """Path and sha256 of each of prepare.sources. The hash of a hub id is null: prepare loads it.

    Raises:
        BadInput: prepare.sources is empty.
    """
    if not params.prepare.sources:
        raise BadInput(
            "assets.data is `files` but prepare.sources is empty: "
            "list your JSONL or Parquet files there"
        )
    paths = [Path(source.path) for source in params.prepare.sources]
    return [
        {"path": str(path), "sha256": file_hash(path) if path.is_file() else None} for path in paths
    ]


def changed_sources(params: Params) -> list[str]:
    """Paths of the user's data files that changed since the assets stage recorded their hashes.

    The files are not DVC dependencies, because dvc.yaml cannot list paths of params.yaml. So DVC
    notices a change of their paths only.

    Raises:
        BadInput: the assets stage has not recorded any hashes.
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
