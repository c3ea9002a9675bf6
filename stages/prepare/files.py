"""Read the users' own data: files of several types, folders, and data sets of the hub."""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stages.lib.core import hub
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.ram import ram_bytes
from stages.lib.core.reading import (
    decode,
    parse_json,
    read_content,
    read_lines,
)
from stages.prepare.turns import Defect

JSON, TABLES, PARQUET = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet",)
COMPRESSED = (".gz", ".zst")
EXPECTED = "a file (.jsonl, .ndjson, .json, .csv, .tsv, also .gz or .zst; .parquet), a folder"
# Splits by the names of a folder's files and folders, as `datasets` has them
SPLITS = {
    "train": r"train|training",
    "test": r"test|testing|eval|evaluation",
    "validation": r"validation|valid|val|dev",
}
# Cells of a table are texts; in these columns, or with these words, they are what JSON has
VALUES = re.compile(r"true|false|-?\d+(\.\d+)?([eE][+-]?\d+)?")
VALUE_COLUMNS = re.compile(
    "label|winner|choice|preference|margin|rank|kto_tag|score|rating|reward|_id$|_tag$|helpfulness",
    re.IGNORECASE,
)
FIX = "correct or remove the line"
PEEKED_BYTES = 1024


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


def read_source(source: SourceParams, max_rows: int | None) -> Iterator[tuple[str, Any]]:
    """Read a source: (file:line, raw row); the raw row of a line that cannot be read is a Defect.

    The line of a Parquet file, a JSON array or a data set is the number of the row.

    Raises:
        BadInput: there is no such file, folder or data set, or it cannot be read.
        Unreachable: a source is on the hub, which cannot be reached.
    """
    path = Path(source.path)
    if is_hub_id(source.path):
        refused = f"no such file, and the hub does not give split {source.split}"
        data = hub.load_data_set(source.path, "prepare.sources", refused, split=source.split)
        rows = located(source.path, enumerate(data, 1))
    elif is_saved(path):
        rows = located(source.path, enumerate(saved_rows(path, source.split), 1))
    else:
        rows = itertools.chain.from_iterable(
            located(str(file), file_rows(file)) for file in local_files(source)
        )
    return itertools.islice(rows, max_rows)


def located(path: str, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[str, Any]]:
    return ((f"{path}:{line}", row) for line, row in rows)


def local_files(source: SourceParams) -> list[Path]:
    """The files of a source; none if it is a data set of the hub or of `save_to_disk`.

    Raises:
        BadInput: there is no such file, or a folder has none of the split.
    """
    path = Path(source.path)
    if path.is_dir():
        return [] if is_saved(path) else folder_files(path, source.split)
    if is_hub_id(source.path):
        return []
    if not path.is_file() or not is_data(path):
        raise BadInput(
            f"prepare.sources: {path}: expected {EXPECTED}, or the hub id of a data set"
            " (name/name@commit)"
        )
    return [path]


def folder_files(path: Path, split: str) -> list[Path]:
    """The files of a split; those in whose path no split is named are of `train`."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        if file.is_file() and is_data(file) and not str(relative).startswith("."):
            words = re.split(r"[^a-z]+", str(relative).lower())[::-1]
            named = (name for word in words for name in SPLITS if re.fullmatch(SPLITS[name], word))
            by_split.setdefault(next(named, "train"), []).append(file)
    if split not in by_split:
        listed = ", ".join(f"{name} ({len(files)} files)" for name, files in by_split.items())
        raise BadInput(
            f"{path}: no files of the split {split}; found {listed or 'no data files'}: name"
            " another `split` of the source, or one of its files"
        )
    return by_split[split]


def file_type(path: Path) -> str:
    """The suffix of a file, without the one of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def is_hub_id(named: str) -> bool:
    """Whether a source is a data set of the hub, and no path here."""
    return named.count("/") == 1 and not Path(named).exists() and not is_data(Path(named))


def is_data(path: Path) -> bool:
    return file_type(path) in (*JSON, *TABLES, *PARQUET)


def is_saved(path: Path) -> bool:
    """Whether a folder is a data set of `save_to_disk`."""
    return any((path / name).exists() for name in ("state.json", "dataset_dict.json"))


def saved_rows(path: Path, split: str) -> Any:
    """The rows of a data set of `save_to_disk`."""
    import datasets

    try:
        data = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: no data set that `datasets` can load: {error}") from None
    if isinstance(data, datasets.Dataset):
        return data
    if split not in data:
        raise BadInput(
            f"{path}: no split {split}; found {', '.join(data)}: set the source's `split`"
        )
    return data[split]


def file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line or number of the row, from 1, raw row) of a file.

    Raises:
        BadInput: it is damaged, not UTF-8, or not of the type that its name says.
    """
    kind = file_type(path)
    if kind in PARQUET:
        yield from enumerate(parquet_rows(path), 1)
    elif kind in TABLES:
        yield from table_rows(path, "\t" if kind == ".tsv" else ",")
    elif is_array(path):
        yield from enumerate(json_array(path), 1)
    else:
        yield from json_lines(path)


def is_array(path: Path) -> bool:
    start = read_content(path, FIX, PEEKED_BYTES)
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def json_array(path: Path) -> list[Any]:
    try:
        # halves of surrogate pairs are a Defect of the text that has them
        value = parse_json(read_content(path, "correct it"), surrogates=True)
    except ValueError as error:
        raise BadInput(f"{path}: not a JSON array: {error}; correct it") from None
    return list(value)


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value); blank lines are skipped."""
    for number, line in read_lines(path, FIX):
        try:
            yield number, parse_json(line, surrogates=True)
        except ValueError as error:
            if number == 1 and file_type(path) == ".json":
                check_one_object(path)
            yield number, Defect(f"not JSON: {error}")


def check_one_object(path: Path) -> None:
    """Check that a file is not one JSON object in several lines."""
    try:
        value = parse_json(read_content(path, FIX))
    except ValueError:
        return
    keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
    raise BadInput(
        f"{path}: one JSON object, with the keys {keys:.100}; expected an array of rows, or one row"
        f" per line: `jq '.KEY' {path} > rows.json` writes the array under a key"
    )


def table_rows(path: Path, delimiter: str) -> Iterator[tuple[int, Any]]:
    """(number of the row's last line, row) of a CSV or TSV file with a header."""
    try:
        text = decode(read_content(path, FIX))
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))  # of the whole process
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = list(reader.fieldnames or [])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"{path}: two columns have the name {twice[0]!r:.60}; rename one of them")
    try:
        for row in reader:
            if None in row or None in row.values():
                yield reader.line_num, Defect(f"expected {len(names)} cells, as the header has")
            else:
                yield reader.line_num, {name: cell(name, text) for name, text in row.items()}
    except csv.Error as error:
        raise BadInput(
            f"{path}:{reader.line_num + 1}: not CSV: {error}; correct the line"
        ) from None


def cell(name: str, text: str) -> Any:
    """The value of a cell: None if it is empty, numbers and booleans in columns for them.

    Example:
        >>> cell("label", "True"), cell("prompt", "7")
        (True, '7')
    """
    if VALUE_COLUMNS.search(name) and VALUES.fullmatch(text.strip().lower()):
        return json.loads(text.strip().lower())
    return text or None


# docs/performance.md: memory at the peak per byte of text in JSON Lines, and what imports, tables
# of hashes and the TF-IDF baseline take for any large number of rows
PEAK_PER_BYTE, FIXED_BYTES = 5.5, 1.2 * 2**30
TEXT_PER_BYTE = 4  # of a compressed file, a guess
SAMPLE_BYTES = 1 << 20  # of a file, to estimate the length of its lines


class Size(NamedTuple):
    """bytes: of the text that is read. rows: their number, an estimate for JSON Lines."""

    bytes: float
    rows: float


def check_memory(sources: Sequence[SourceParams], config: PrepareParams) -> None:
    """Check that the machine has the memory for the rows of local files, if all of it were free."""
    files = [file for source in sources for file in local_files(source)]
    sizes = [size_to_read(file, config.max_rows) for file in files]
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
        sample = read_content(path, FIX, SAMPLE_BYTES)
        lines = max(sample.count(b"\n"), 1)
        size = Size(path.stat().st_size, path.stat().st_size * lines / max(len(sample), 1))
        if path.suffix in COMPRESSED:
            size = Size(size.bytes * TEXT_PER_BYTE, size.rows * TEXT_PER_BYTE)
    share = 1.0 if max_rows is None else min(max_rows / max(size.rows, 1), 1.0)
    return Size(size.bytes * share, size.rows * share)
