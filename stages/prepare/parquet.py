"""Rows of Parquet files, which may be damaged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput, RondoError


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Within this context, an error of pyarrow about the file is a BadInput."""
    try:
        yield
    except RondoError:
        raise
    # pyarrow raises its own errors, OSError, MemoryError and, of texts, UnicodeDecodeError
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{path}: no Parquet file that can be read ({type(error).__name__}: {reason}); "
            "write it again, or convert it to JSON Lines"
        ) from None


def open_parquet(path: Path) -> Any:
    """pyarrow's ParquetFile.

    Raises:
        BadInput: it is damaged, or two of its columns have one name.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]  # comes with datasets

    with parquet_errors(path):
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"{path}: two columns have the name {twice[0]!r:.60}; rename one of them")
    return file


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, by the names of the columns.

    Raises:
        BadInput: the file is damaged.
    """
    file = open_parquet(path)
    with parquet_errors(path):
        for batch in file.iter_batches():
            yield from batch.to_pylist()
