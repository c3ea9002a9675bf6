"""Whether files are still those that DVC recorded.

DVC takes a file for unchanged if its time and size are, and an object of its cache if it is
read-only. A failing disk changes neither. So the files that a stage reads, and those that DVC
restored, are hashed again here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.lib.core.errors import StorageFailed


@contextmanager
def without_memory(repo: Any) -> Iterator[None]:
    """Within this context, DVC computes each hash anew."""
    from dvc_data.hashfile.state import StateNoop

    objects = [odb for _, odb in repo.cache.by_scheme()]
    remembered = [odb.state for odb in objects]
    for odb in objects:
        odb.state = StateNoop()
    try:
        yield
    finally:
        for odb, state in zip(objects, remembered, strict=True):
            odb.state = state


def check_inputs(repo: Any, address: str) -> None:
    """Check that the files that a stage reads are those that the stages before it made.

    Raises:
        StorageFailed: one of them is not, though its time and size are. The next run sees it.
    """
    (stage,) = repo.stage.collect(address)
    read = [Path(dep.fs_path) for dep in stage.deps]
    made = [
        out
        for before in repo.index.graph.successors(stage)
        for out in before.outs
        if any(path.is_relative_to(out.fs_path) for path in read)
        or any(Path(out.fs_path).is_relative_to(path) for path in read)
    ]
    for out in _damaged(repo, made):
        _forget(out)
        raise StorageFailed(
            f"{out}: its content is not what {out.stage.addressing} wrote, but its time and size "
            f"are: a failing disk? (`dmesg`) Next: run the same command again, which restores it "
            f"from DVC's cache or runs {out.stage.addressing} again"
        )


def drop_damaged_cache(repo: Any, target: str) -> list[str]:
    """Delete what DVC restored from damaged objects of its cache, and these objects.

    Args:
        target: an address, or the .dvc file of an ended round.

    Returns:
        The outputs that were deleted: they have to be made or fetched again.
    """
    (stage,) = repo.stage.collect(target)
    damaged = _damaged(repo, [out for out in stage.outs if out.use_cache])
    with without_memory(repo):
        for out in damaged:
            _drop(out.cache, out.hash_info)
            out.remove()
    return [str(out) for out in damaged]


def _drop(cache: Any, hash_info: Any) -> None:
    """Delete the damaged objects of an output: its file, or its list of files and these."""
    from dvc_data.hashfile import load
    from dvc_objects.errors import ObjectFormatError

    # after a damaged list, its files are checked when it is there again
    with suppress(FileNotFoundError, ObjectFormatError):
        _verify(cache, hash_info.value)
        listed: Any = load(cache, hash_info) if hash_info.isdir else ()
        for _, _, file in listed:
            with suppress(FileNotFoundError, ObjectFormatError):
                _verify(cache, file.value)


def _verify(cache: Any, oid: str) -> None:
    """Have DVC hash an object; it deletes a damaged one and raises ObjectFormatError."""
    os.chmod(cache.oid_to_path(oid), 0o644)  # DVC trusts what is read-only
    cache.check(oid)


def _damaged(repo: Any, outs: list[Any]) -> list[Any]:
    with without_memory(repo):
        return [out for out in outs if out.exists and out.hash_info and out.changed_checksum()]


def _forget(out: Any) -> None:
    """Change the times of a file, or of all files of a folder, so that DVC hashes them again."""
    path = Path(out.fs_path)
    for file in path.rglob("*") if path.is_dir() else [path]:
        os.utime(file)
