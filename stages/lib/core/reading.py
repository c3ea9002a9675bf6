"""Text, JSON and YAML of files that may be damaged, or that people edit.

The standard parsers take what must not pass silently, such as a key that is there twice, and raise
errors of many types. The functions here raise ValueError with the reason, or BadInput with file and
line.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from stages.lib.core.errors import BadInput

MAX_DEPTH = 100  # of nested lists and objects: code that walks them recursively must not fail
MAX_ALIASED_NODES = 100_000  # of a YAML document with its aliases written out
MAX_DIGITS = 300  # of an integer: a float can hold it
MAX_LINE_BYTES = 64 << 20


def parse_json(text: str | bytes, surrogates: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: bytes are UTF-8.
        surrogates: whether a text may contain half of a surrogate pair, which no file can have.

    Raises:
        ValueError: it is not JSON or not UTF-8, has a key twice, or is nested too deeply.

    Example:
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: the key 'a' is there twice
    """
    if isinstance(text, bytes):
        text = decode(text)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if not surrogates and "\\ud" in text.lower():
        check_characters(json.dumps(value, ensure_ascii=False))
    return value


def check_characters(text: str) -> str:
    """The text, if a file can have it.

    Raises:
        ValueError: it contains half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = ord(text[error.start])
        raise ValueError(f"contains half of a surrogate pair, U+{character:X}: remove it") from None
    return text


def decode(content: bytes) -> str:
    """UTF-8 as text; a byte order mark at its start is left out.

    Raises:
        ValueError: it is not UTF-8; names the byte and the line, from 1.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # with a byte order mark, which is no line, the codec counts from behind it
        line = content.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"not UTF-8: byte 0x{byte:02x} in line {line}; save it as UTF-8") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in values if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.60} is there twice")
    return values


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


class _Constructor(SafeConstructor):
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """What the constructors of tags raise, e.g. of the date 2001-13-01, gets its line."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            kind = str(node.tag).rpartition(":")[2]
            problem = f"{node.value!r:.60} is no {kind}"
            raise ConstructorError(None, None, problem, node.start_mark) from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML 1.2 document; None if it is empty.

    Raises:
        ValueError: it is not YAML, has a key twice, is nested too deeply, or is too large with its
            aliases written out. Names the line, from 1.
    """
    try:
        value = _load(text)  # libyaml's parser: the pure one takes a second for dvc.lock
    except YAMLError as error:
        try:
            value = _load(text, pure=True)  # which also takes `{function: module:name}`
        except YAMLError:
            raise ValueError(_message(error)) from None
    _check_depth(value)
    return value


def _message(error: YAMLError) -> str:
    if not isinstance(error, MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark else ""
    problem = str(error.problem or error.context)
    if isinstance(error, DuplicateKeyError):
        problem = f"{problem.partition(' with value ')[0]:.80}"
    return f"{where}{problem}"


def _load(text: str, pure: bool = False) -> Any:
    loader = YAML(typ="safe", pure=pure)
    loader.Constructor = _Constructor
    _check_size(text, pure)
    return loader.load(text)


def _check_size(text: str, pure: bool) -> None:
    """libyaml's own recursion has no limit: a document of 200,000 brackets ends the process. With
    aliases, a small document can be large or endless.
    """
    counts, anchors = [0], [None]  # of the document and the collections that are open
    sizes: dict[str | None, int] = {}  # of those with an anchor, with their aliases written out
    for event in YAML(typ="safe", pure=pure).parse(text):
        if isinstance(event, CollectionStartEvent):
            counts.append(1)
            anchors.append(event.anchor)
        elif isinstance(event, CollectionEndEvent):
            size = counts.pop()
            sizes[anchors.pop()] = size
            counts[-1] += size
        elif isinstance(event, AliasEvent):
            inside_itself = event.anchor in anchors
            counts[-1] += MAX_ALIASED_NODES if inside_itself else sizes.get(event.anchor, 1)
        else:
            counts[-1] += 1
        line = event.start_mark.line + 1
        if len(counts) > MAX_DEPTH + 1:
            raise ValueError(f"line {line}: nested deeper than {MAX_DEPTH} levels")
        if counts[-1] > max(MAX_ALIASED_NODES, len(text)):
            raise ValueError(f"line {line}: too large with its aliases written out")


def read_text(path: Path, fix: str) -> str:
    """The text of a UTF-8 file; a byte order mark at its start is left out.

    Args:
        path: the file.
        fix: the next step for the user, for messages.

    Raises:
        BadInput: it is missing, no regular file, not readable, or not UTF-8.
    """
    with opened(path, fix) as stream:
        content = stream.read()
    try:
        return decode(content).replace("\r\n", "\n")
    except ValueError as error:
        raise BadInput(f"{path}: {error}; {fix}") from None


def read_yaml(path: Path, fix: str) -> Any:
    """The value of a YAML file; None if it is empty.

    Args:
        path: the file.
        fix: the next step for the user, for messages.

    Raises:
        BadInput: the file cannot be read, or is not YAML; names the line.
    """
    try:
        return parse_yaml(read_text(path, fix))
    except ValueError as error:
        raise BadInput(f"{path}: not YAML: {error}; {fix}") from None


def opened(path: Path, fix: str) -> IO[bytes]:
    """A regular file, open for reading; the next step `fix` is for messages.

    Raises:
        BadInput: it is missing, no regular file, or not readable.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device could be read without end
            raise BadInput(f"{path} is a folder or a device, expected a file; {fix}")
        return path.open("rb")
    except FileNotFoundError:
        raise BadInput(f"{path} is missing: {fix}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in its name
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{str(path)!r:.200} cannot be read ({reason}); {fix}") from None


def decompressed(stream: IO[bytes], suffix: str) -> IO[bytes]:
    """The content of a .gz or .zst file; any other stream as it is."""
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    if suffix == ".zst":
        import pyarrow  # type: ignore[import-untyped]  # comes with datasets

        return io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd"))
    return stream


DAMAGED = (EOFError, OSError, zlib.error)  # of a compressed file


def read_content(path: Path, fix: str, size: int = -1) -> bytes:
    """The content of a file, or of a compressed one (.gz, .zst); at most `size` bytes, if given.

    Raises:
        BadInput: as `opened`; or a compressed file is damaged.
    """
    with opened(path, fix) as stream:
        try:
            return decompressed(stream, path.suffix).read(size)
        except DAMAGED as error:
            raise BadInput(f"{path}: damaged ({error}); {fix}") from None


def read_lines(path: Path, fix: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of each line of a file that is not blank; .gz and .zst as above.

    Raises:
        BadInput: as `opened`; a line is too long, or a compressed file is damaged.
    """
    with opened(path, fix) as stream:
        number = 0
        try:
            lines = decompressed(stream, path.suffix)
            for line in iter(partial(lines.readline, MAX_LINE_BYTES), b""):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    limit = f"{MAX_LINE_BYTES >> 20} MiB"
                    raise BadInput(f"{path}:{number}: the line has more than {limit}; {fix}")
                if line.strip():
                    yield number, line
        except DAMAGED as error:
            raise BadInput(f"{path}:{number + 1}: damaged ({error}); {fix}") from None
