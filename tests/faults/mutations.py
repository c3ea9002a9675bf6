"""Good files and values made bad, by a generator of random numbers with a seed."""

import json
import math
import random
import re
from collections.abc import Callable
from typing import Any

DEEP = 3000  # levels: more than Python's recursion limit
LONG = 100_000  # characters
# what takes the place of a value
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, 10**400, -(10**20), 0.5, 1e308, 5e-324),
    *(math.nan, math.inf, -math.inf),
    *("", " ", "\n", "\0", "\ud800", "\udc00x", "\u2028", "\ufeff", "1", "nan", "null", "x" * LONG),
    *(
        "../../etc/passwd",
        "/dev/zero",
        "é" * 300,
        "\U0001f600",
        "\u202eabc",
        "{{7*7}}",
        "%s%n",
        "--help",
    ),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["x"] * 1000, [{"role": "user"}]),
    *([{"role": "oracle", "content": "x"}], [{"role": "user", "content": None}]),
)
NUMBERS = (
    *(b"NaN", b"Infinity", b"-Infinity", b".nan", b".inf", b"1e999", b"-0", b"9" * 5000),
    *(b"9" * 400, b"null", b"true", b"0x1F", b"1_0", b"1e5", b"2001-13-01"),
)
# what is put between two bytes of a file
SNIPPETS = (
    *(b"\0", b"\xff", b"\xe9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xc0\xaf", b"\r", b"\n", b"\t"),
    *("\u2028".encode(), "\u0085".encode(), "\u202e".encode(), b"\\ud800", b"\\u0000", b'"', b"'"),
    *NUMBERS,
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"#",
        b"&a",
        b"*a",
        b"!!int ",
        b"!!python/name:os.system ",
    ),
    *(b"<<: ", b"- ", b"? ", b"|", b"---\n", b"%YAML 9.9\n", b"\\", b"/*x*/", b"=", b"2001-13-01"),
)


def _spot(rng: random.Random, content: bytes) -> int:
    return rng.randrange(len(content) + 1)


def _range(rng: random.Random, content: bytes) -> tuple[int, int]:
    start, end = sorted((_spot(rng, content), _spot(rng, content)))
    return start, end


def _flip_bit(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content or b"x")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _random_byte(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content or b"x")
    changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut_end(rng: random.Random, content: bytes) -> bytes:
    return content[: _spot(rng, content)]


def _cut_start(rng: random.Random, content: bytes) -> bytes:
    return content[_spot(rng, content) :]


def _cut_middle(rng: random.Random, content: bytes) -> bytes:
    start, end = _range(rng, content)
    return content[:start] + content[end:]


def _repeat_part(rng: random.Random, content: bytes) -> bytes:
    start, end = _range(rng, content)
    return content[:end] + content[start:]


def _insert(rng: random.Random, content: bytes) -> bytes:
    at = _spot(rng, content)
    return content[:at] + rng.choice(SNIPPETS) + content[at:]


def _replace_number(rng: random.Random, content: bytes) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", content))
    if not numbers:
        return _insert(rng, content)
    match = rng.choice(numbers)
    return content[: match.start()] + rng.choice(NUMBERS) + content[match.end() :]


def _lines(rng: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    action = rng.randrange(4)
    if action == 0:
        lines.insert(i, lines[j])
    elif action == 1:
        del lines[i]
    elif action == 2:
        lines[i], lines[j] = lines[j], lines[i]
    else:
        lines[i] = rng.choice([b"", b" ", b"\t", b"{}", b"[]", b"1", b'"x"', b"null"])
    return b"\n".join(lines)


def _as_text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


WHOLE: tuple[Callable[[bytes], bytes], ...] = (
    lambda content: b"",
    lambda content: b"\n \n",
    lambda content: b"\xef\xbb\xbf" + content,
    lambda content: _as_text(content).encode("utf-16"),
    lambda content: _as_text(content).encode("utf-16-le"),
    lambda content: _as_text(content).encode("utf-32"),
    lambda content: _as_text(content).encode("latin-1", "replace") + b"\xe9",
    lambda content: content.replace(b"\n", b"\r\n"),
    lambda content: content.replace(b"\n", b"\r"),
    lambda content: content.replace(b"\n", b""),
    lambda content: content.replace(b'"', b"'"),
    lambda content: content.rstrip(b"\n"),
    lambda content: content[::-1],
    lambda content: b"[" * DEEP * 10,
    lambda content: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    lambda content: b"- " * DEEP + b"x",
    lambda content: b"\0" * 1000,
    lambda content: bytes(range(256)) * 4,
    lambda content: (
        b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(
            b"%c: &%c [%b]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9))
            for i in range(9)
        )
    ),
)
PARTS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flip_bit, _random_byte, _cut_end, _cut_start, _cut_middle, _repeat_part),
    *(_insert, _insert, _replace_number, _lines, _lines),
)


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """A file's content with one to three changes."""
    if rng.random() < 0.08:
        return rng.choice(WHOLE)(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(PARTS)(rng, content)
    return content


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values are in nested lists and objects, the whole first."""
    keys = (
        value.keys()
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    return [path, *(inner for key in keys for inner in _paths(value[key], (*path, key)))]


def deep(levels: int) -> Any:
    """Lists within each other."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def mutated_value(rng: random.Random, value: Any) -> Any:
    """A value of JSON with one change: another type, a missing, additional or misspelt key."""
    value = json.loads(json.dumps(value))
    *above, key = rng.choice([path for path in _paths(value) if path] or [()]) or (None,)
    if key is None or rng.random() < 0.02:
        return rng.choice(STRANGE)
    holder = value
    for step in above:
        holder = holder[step]
    action = rng.randrange(10)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "zzz", f"{key} ", str(key).upper(), "\0", "__class__"))] = (
            holder.pop(key)
        )
    elif action == 2 and isinstance(holder, dict):
        holder["zzz"] = rng.choice(STRANGE)
    elif action == 3:
        holder[key] = [holder[key]]
    elif action == 4:
        holder[key] = str(holder[key])
    elif action == 5:
        holder[key] = deep(rng.choice((3, 99, 101, 500)))
    elif action == 6 and isinstance(holder, list):
        holder += holder[:3]
    else:
        holder[key] = rng.choice(STRANGE)
    return value


def as_json(rng: random.Random, value: Any) -> str:
    """The value as JSON, as a careless program writes it: NaN, surrogates, keys twice."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if isinstance(value, dict) and value and rng.random() < 0.1:
        key = rng.choice(list(value))
        return f"{text[:-1]}, {json.dumps(key)}: {json.dumps(rng.choice(STRANGE))}}}"
    return text


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """A JSON file with one change, of a value or of bytes."""
    if rng.random() < 0.6:
        text = as_json(rng, mutated_value(rng, value))
        return text.encode("utf-8", "surrogatepass")
    return mutated_bytes(rng, json.dumps(value, indent=rng.choice((None, 2))).encode())


def mutated_jsonl(rng: random.Random, rows: list[Any]) -> bytes:
    """A JSON Lines file with one change, of a value in a row or of bytes."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if rng.random() < 0.6:
        number = rng.randrange(len(rows))
        lines[number] = as_json(rng, mutated_value(rng, rows[number]))
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    return mutated_bytes(rng, ("\n".join(lines) + "\n").encode())
