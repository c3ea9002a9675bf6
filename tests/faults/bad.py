"""Strategies for Hypothesis: good files and values with one to three changes. And what a reader may
make of them.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from stages.lib.core.errors import RondoError
from tests.faults.projects import FULL

MAX_SECONDS = 5.0  # of CPU time, per input
MAX_MESSAGE = 3000  # characters
DEEP = 3000  # levels: more than Python's recursion limit
# words of a next step
STEPS = re.compile(
    r"\b(run|restore|correct|fix|delete|save|set|choose|expected|remove|write|rename|raise|lower|"
    r"give|add|see|copy|start|repair|wanted|needs|must|wrong|name|use|spell|unset|convert|"
    r"did you mean)\b",
    re.IGNORECASE,
)
STRANGE: list[Any] = [  # what takes the place of a value
    *(2**63, 10**400, 1e308, 5e-324, "", "\0", "\ud800", "\u2028", "\ufeff", "nan", "x" * 100_000),
    *("../../etc/passwd", "/dev/zero", "\u202eabc", "{{7*7}}", "--help", [None], {"": None}),
    *([{"role": "oracle", "content": "x"}], [{"role": "user", "content": None}]),
]
SNIPPETS = [  # what is put between two bytes of a file
    *(
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n",
        b"\t",
        b'"',
        b"'",
        b"\\ud800",
    ),
    *("\u2028".encode(), "\u202e".encode(), b"NaN", b"Infinity", b".inf", b"1e999", b"9" * 5000),
    *(b"null", b"true", b"0x1F", b"1_0", b"{", b"}", b"[", b"]", b",", b":", b"#", b"&a", b"*a"),
    *(b"!!python/name:os.system ", b"<<: ", b"- ", b"? ", b"|", b"---\n", b"%YAML 9.9\n", b"="),
]
YAML_BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%b]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
Bad = TypeVar("Bad")


def bad_bytes(content: bytes) -> SearchStrategy[bytes]:
    """One to three parts of a file are replaced, doubled or lost; or the whole is another one."""
    text = content.decode("utf-8", "replace")
    whole: list[bytes] = [b"", b"\n \n", b"\xef\xbb\xbf" + content, b"[" * DEEP * 10, b"\0" * 1000]
    whole += [b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"- " * DEEP + b"x", YAML_BOMB]
    whole += [text.encode("utf-16"), text.encode("latin-1", "replace") + b"\xe9", content[::-1]]
    whole += [content.replace(b"\n", b"\r\n"), content.replace(b'"', b"'"), content * 2]

    @st.composite
    def spliced(draw: st.DrawFn) -> bytes:
        changed = content
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, len(changed)))
            end = draw(st.integers(start, len(changed)) | st.integers(start, start + 8))
            part = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=4))
            changed = changed[:start] + part + changed[end:]
        return changed

    return st.one_of(spliced(), spliced(), spliced(), st.sampled_from(whole))


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values are in nested lists and objects, the whole first."""
    inner: Any = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = value.items()
    return [path, *(deeper for key, part in inner for deeper in paths(part, (*path, key)))]


@st.composite
def bad_value(draw: st.DrawFn, good: Any) -> Any:
    """A value of JSON with one change: another type, a missing, additional or misspelt key."""
    value = json.loads(json.dumps(good))
    strange = draw(VALUES | st.sampled_from(STRANGE))
    places = paths(value)[1:]
    if not places:
        return strange
    *above, key = draw(st.sampled_from(places))
    holder = value
    for step in above:
        holder = holder[step]
    action = draw(st.sampled_from(["lose", "misspell", "wrap", "text", *["replace"] * 4]))
    if action == "lose":
        del holder[key]
    elif action == "misspell" and isinstance(holder, dict):
        holder[f"{key} "] = holder.pop(key)
    elif action == "wrap":
        holder[key] = [holder[key]]
    elif action == "text":
        holder[key] = str(holder[key])
    else:
        holder[key] = strange
    return value


def as_json(value: Any) -> bytes:
    """As a careless program writes it, with NaN and surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def bad_json(good: Any) -> SearchStrategy[bytes]:
    """A JSON file with one change, of a value or of bytes."""
    return bad_value(good).map(as_json) | bad_bytes(json.dumps(good, indent=2).encode())


def bad_jsonl(rows: list[Any]) -> SearchStrategy[bytes]:
    """A JSON Lines file with one change, of a value in a row or of bytes."""
    changed = bad_value(rows).map(lambda values: b"".join(as_json(row) + b"\n" for row in values))
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    return changed | bad_bytes(b"\n".join([*lines, b""]))


def examples(fast: int, full: int) -> settings:
    """How many inputs a test tries, the same in each run."""
    return settings(
        max_examples=full if FULL else fast,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def writing(name: str, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    """A function that writes its argument to a file and calls the reader."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)

    def write_and_read(content: bytes) -> Any:
        path.write_bytes(content)
        return read()

    return write_and_read


def try_bad(
    inputs: SearchStrategy[Bad],
    read: Callable[[Bad], Any],
    check: Callable[[Bad, Any], object],
    place: str,
    fast: int = 60,
    full: int = 400,
) -> None:
    """Each bad input is accepted, with a result that is right, or refused by a typed error that
    names the place and the next step.

    Args:
        read: the project's own reader.
        check: asserts that an accepted result is right, without the reader.
        place: a pattern in the message of an error, e.g. the name of the file.
    """

    @examples(fast, full)
    @given(inputs)
    def attempt(bad: Bad) -> None:
        started = time.process_time()
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                result = read(bad)
        except RondoError as error:
            message = str(error)
            assert re.search(place, message) and STEPS.search(message), message
            assert len(message) <= MAX_MESSAGE, f"{len(message)} characters: {message[:300]}"
        else:
            check(bad, result)
        assert time.process_time() - started < MAX_SECONDS

    attempt()
