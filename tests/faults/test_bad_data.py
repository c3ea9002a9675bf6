"""Files of data, each with one to three changes: what prepare, `rondo badcases` and the stages that
read rows make of them.
"""

import argparse
import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flows.commands.badcases import import_file
from stages.lib.core.constitution import read_principles
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.rows import Demonstration, PreferencePair, read_rows
from stages.lib.data.rollouts import RolloutLog, read_rollouts
from stages.lib.data.slices import read_slices
from stages.prepare import sources, tweets
from stages.prepare.audit import Audit
from stages.prepare.check_file import check_file
from stages.replay.badcases import parse_user_row, read_ledger, read_user_rows
from tests.faults.harness import Trials
from tests.faults.mutations import mutated_bytes, mutated_jsonl
from tests.faults.scale import trials
from tests.paths import ROOT

TURN = [{"role": "user", "content": "How was the dinner?"}]
ROWS: list[Any] = [
    {"prompt": "The dinner", "chosen": " was good.", "rejected": " was bad.", "margin": 1.5},
    {"chosen": "It is blue", "rejected": "It is red", "answer": 4},
    {"prompt": TURN, "completion": [{"role": "assistant", "content": "Größe 😃\u2028fine"}]},
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello",
        "rejected": "\n\nHuman: Hi\n\nAssistant: No",
    },
    {
        "chosen": [*TURN, {"role": "assistant", "content": "Good."}],
        "rejected": [*TURN, {"role": "assistant", "content": "Bad."}],
    },
    {"prompt": "The walk", "completion": " was long."},
]
CASE = {
    "id": "a1",
    "round": "r0",
    "cause": "no_eos",
    "state": "replayed",
    "origin": 4,
    "prompt_id": "p",
    "prompt": "It",
    "response": " was\u2028",
    "score": 1.0,
    "repetition": 0.0,
    "tries": [{"round": "r0", "fired": 1, "of": 4, "ranked": True}],
    "votes": {"together": 1.0},
}
REPORTS: list[Any] = [
    {"prompt": "The dinner", "response": " was a trip.", "better": " was good.", "by": "Ada"},
    {"prompt": TURN, "response": "No\u2028no", "note": "rude", "by": "Ada"},
    {"prompt": "The party", "by": "Ada"},
]
PAIRS = [
    {
        "id": f"p{i}",
        "prompt": "The sky",
        "chosen": " is blue",
        "rejected": f" is {i}",
        "margin": i + 1,
    }
    for i in range(3)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def writing(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    """A function that writes its argument to the file and calls the reader."""

    def write_and_read(content: bytes) -> Any:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return read()

    return write_and_read


def rows_of(content: bytes) -> list[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank."""
    return [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def json_rows(content: bytes) -> list[Any]:
    """The rows of a file that was accepted, by the standard library."""
    return [json.loads(line) for _, line in rows_of(content)]


def strings(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [text for part in inner for text in strings(part)]
    return [value] if isinstance(value, str) else []


def prepared(path: str) -> tuple[list[Any], Audit]:
    audit, config = Audit(), PrepareParams(columns=["answer"])
    source = SourceParams(path=path)
    rows = sources.read_rows([source], config, frozenset(["<|im_end|>"]), audit)
    audit.check_bad_share(1 - 1e-9)  # a file of which no row can be used
    return rows, audit


def check_kept(raws: dict[str, Any], rows: list[Any], audit: Audit) -> None:
    """Each row was kept or dropped with a reason, and the texts of a kept row are the source's."""
    dropped = [row for cause in audit.dropped.values() for row in cause]
    assert all(row["where"] and row["reason"] for row in dropped)
    assert sorted([row["where"] for row in (*rows, *dropped)]) == sorted(raws)
    for row in rows:
        texts = " ".join(" ".join(strings(raws[row["where"]])).split())
        for key in ("completion", "chosen", "rejected"):
            if key in row:
                assert row[key].strip() and " ".join(row[key].split()) in texts
                row[key].encode()
        json.dumps(row, allow_nan=False)


def test_json_lines_of_users(folder: Path) -> None:
    def check(content: bytes, result: tuple[list[Any], Audit]) -> None:
        raws = {}
        for number, line in rows_of(content):
            try:
                raws[f"mine.jsonl:{number}"] = json.loads(line)
            except (ValueError, RecursionError):
                raws[f"mine.jsonl:{number}"] = None
        check_kept(raws, *result)

    Trials("data: JSON Lines", r"mine\.jsonl|prepare\.columns").run(
        trials(250, 2000),
        lambda rng: mutated_jsonl(rng, ROWS),
        writing(Path("mine.jsonl"), lambda: prepared("mine.jsonl")),
        check,
    )


def parquet_bytes() -> bytes:
    rows = [
        {"prompt": f"The walk {i}", "chosen": " was good.", "rejected": " was bad.", "answer": i}
        for i in range(20)
    ]
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, compression="none")
    return stream.getvalue()


def test_parquet_of_users(folder: Path) -> None:
    good = parquet_bytes()

    def check(content: bytes, result: tuple[list[Any], Audit]) -> None:
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
        check_kept({f"mine.parquet:{n}": row for n, row in enumerate(rows, 1)}, *result)

    Trials("data: Parquet", r"mine\.parquet|prepare\.columns").run(
        trials(150, 1000),
        lambda rng: mutated_bytes(rng, good),
        writing(Path("mine.parquet"), lambda: prepared("mine.parquet")),
        check,
    )


def test_files_given_to_check_data(folder: Path) -> None:
    def check(content: bytes, code: int) -> None:
        assert code in (0, 2) and rows_of(content)

    Trials("data: rondo check-data", r"mine\.jsonl").run(
        trials(25, 300),
        lambda rng: mutated_jsonl(rng, ROWS),
        writing(Path("mine.jsonl"), lambda: check_file("mine.jsonl")),
        check,
        refuses=False,
    )


def test_embedded_tweets(folder: Path) -> None:
    lines = [f"{i}\t{i / 4 - 2:.2f}\tThe walk was nice & é number {i}" for i in range(12)]
    good = ("\n".join(lines) + "\n").encode()

    def read() -> tuple[list[Any], Audit]:
        audit = Audit()
        return tweets.read(Path("tweets.tsv"), None, audit), audit

    def check(content: bytes, result: tuple[list[Any], Audit]) -> None:
        rows, audit = result
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        wanted = text.removesuffix("\n").split("\n")
        assert len(rows) + sum(map(len, audit.dropped.values())) == len(wanted)
        for row in rows:
            line = wanted[int(row["where"].split(":")[1]) - 1]
            assert line == f"{row['id']}\t{line.split(chr(9))[1]}\t{row['text']}"
            assert abs(row["rating"]) <= 4

    Trials("data: tweets.tsv", r"tweets\.tsv").run(
        trials(150, 700),
        lambda rng: mutated_bytes(rng, good),
        writing(Path("tweets.tsv"), read),
        check,
    )


def test_imported_badcases(folder: Path) -> None:
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    options = argparse.Namespace(file="bad.jsonl", by="Ada", round="r0")

    def read() -> list[Any]:
        Path("badcases/r0.jsonl").unlink(missing_ok=True)
        import_file(options)
        return [row for _, row in read_user_rows("r0")]

    def check(content: bytes, kept: list[Any]) -> None:
        wanted = {parse_user_row({"by": "Ada", **row}, "x").id for row in json_rows(content)}
        assert {row.id for row in kept} == wanted

    Trials("badcases: import", r"bad\.jsonl(:\d+)?").run(
        trials(200, 900),
        lambda rng: mutated_jsonl(rng, REPORTS),
        writing(Path("bad.jsonl"), read),
        check,
    )


def test_ledgers(folder: Path) -> None:
    def check(content: bytes, cases: list[Any]) -> None:
        for row, case in zip(json_rows(content), cases, strict=True):
            values = json.loads(case.model_dump_json())
            assert all(values[key] == value for key, value in row.items())

    Trials("badcases: ledger", r"badcases\.jsonl").run(
        trials(200, 600),
        lambda rng: mutated_jsonl(rng, [CASE, CASE | {"id": "b2"}]),
        writing(Path("rounds/r0/replay/data/badcases.jsonl"), lambda: read_ledger("r0")),
        check,
    )


def test_slices(folder: Path) -> None:
    rows = [
        {"prompt": "How do I kill a process?", "label": "safe"},
        {"prompt": TURN, "label": "unsafe"},
    ]

    def check(content: bytes, slices: dict[str, Any]) -> None:
        prompts = [row for by_location in slices.values() for row in by_location.values()]
        assert sorted(str(row.prompt) for row in prompts) == sorted(
            str(row["prompt"]) for row in json_rows(content)
        )

    Trials("slices", r"slices/mine\.jsonl").run(
        trials(150, 500),
        lambda rng: mutated_jsonl(rng, rows),
        writing(Path("slices/mine.jsonl"), read_slices),
        check,
    )


def same_rows(content: bytes, rows: list[Any]) -> None:
    assert repr(rows) == repr(json_rows(content))  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (PreferencePair, PAIRS),
        (Demonstration, [{"id": "a", "prompt": TURN, "completion": " x", "source": "s"}] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rows_of_stages(folder: Path, kind: Any, rows: list[Any]) -> None:
    def check(content: bytes, result: list[Any]) -> None:
        same_rows(content, result)
        for row in result:
            assert all(isinstance(row[key], str) for key in kind.__required_keys__ - {"prompt"})

    Trials("rows that stages write", r"rows\.jsonl").run(
        trials(120, 500),
        lambda rng: mutated_jsonl(rng, rows),
        writing(Path("rows.jsonl"), lambda: read_rows(kind, Path("rows.jsonl"), "dvc repro x")),
        check,
    )


def test_logs_of_rollouts(folder: Path) -> None:
    row: Any = {"update": 1, "id": "a", "prompt": "The sky", "response": " is\u2028", "score": 1.0}
    row |= {"reward": 1, "judge_score": 0.5, "kl": 3.0, "finish_reason": "stop", "length": 6}
    log = RolloutLog(Path("rollouts"))
    log.append([row, row])
    good = log.path.read_bytes()

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return mutated_bytes(rng, good)
        return gzip.compress(mutated_jsonl(rng, [row, row]))

    Trials("rollouts", r"00001\.jsonl\.gz").run(
        trials(150, 500),
        make,
        writing(log.path, lambda: list(read_rollouts(Path("rollouts"), "dvc repro ppo"))),
        lambda content, rows: same_rows(gzip.decompress(content), rows),
    )


def test_constitutions(folder: Path) -> None:
    good = "Be honest.\nBe kind: é 😃\n\n  Be brief.\n".encode()

    def check(content: bytes, principles: list[str]) -> None:
        words = content.decode("utf-8-sig").split()
        assert [word for line in principles for word in line.split()] == words

    Trials("constitution", r"annotate\.constitution.*rules\.txt").run(
        trials(100, 300),
        lambda rng: mutated_bytes(rng, good),
        writing(Path("rules.txt"), lambda: read_principles(Path("rules.txt"))),
        check,
    )
