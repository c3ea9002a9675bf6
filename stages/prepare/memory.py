"""The memory that prepare needs, estimated from the files before they are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.ram import ram_bytes
from stages.prepare.parquet import open_parquet

# docs/performance.md: memory at the peak per byte of text in JSON Lines, and what imports, tables
# of hashes and the TF-IDF baseline take for any large number of rows
PEAK_PER_BYTE, FIXED_BYTES = 5.5, 1.2 * 2**30
SAMPLE_BYTES = 1 << 20  # of a file, to estimate the length of its lines


class Size(NamedTuple):
    """bytes: of the text that is read. rows: their number, an estimate for JSON Lines."""

    bytes: float
    rows: float


def check_memory(sources: Sequence[SourceParams], config: PrepareParams) -> None:
    """Check that the machine has the memory for the rows of local files, if all of it were free.

    Raises:
        BadInput: it has not; names the number of rows that fit.
    """
    sizes = [
        size_to_read(Path(source.path), config.max_rows)
        for source in sources
        if Path(source.path).is_file()
    ]
    text, rows = (sum(column) for column in zip(Size(0, 0), *sizes, strict=True))
    available = ram_bytes()
    needed = FIXED_BYTES + PEAK_PER_BYTE * text
    if needed > available:
        fitting = int(rows * max(available - FIXED_BYTES, 0) / (needed - FIXED_BYTES) / len(sizes))
        raise BadInput(
            f"prepare.sources: about {rows:,.0f} rows with {text / 2**30:.1f} GiB of text need "
            f"about {needed / 2**30:.1f} GiB of memory, and this machine has "
            f"{available / 2**30:.1f} GiB: set prepare.max_rows to at most {fitting:,} rows per "
            "source, or run prepare on a machine with more memory"
        )


def size_to_read(path: Path, max_rows: int | None) -> Size:
    """The size of the rows of a file that prepare reads: at most `max_rows`."""
    if path.suffix == ".parquet":
        metadata = open_parquet(path).metadata
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        size = Size(sum(group.total_byte_size for group in groups), metadata.num_rows)
    else:
        with path.open("rb") as stream:
            sample = stream.read(SAMPLE_BYTES)
        lines = max(sample.count(b"\n"), 1)
        size = Size(path.stat().st_size, path.stat().st_size * lines / max(len(sample), 1))
    share = 1.0 if max_rows is None else min(max_rows / max(size.rows, 1), 1.0)
    return Size(size.bytes * share, size.rows * share)
