"""Files of data, each with one to three changes: what prepare, `rondo badcases` and the stages that
read rows make of them.
"""

import io
import json
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flows.cli import main
from stages.lib.core.constitution import read_principles
from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.data.slices import read_slices
from stages.prepare import sources
from stages.prepare.audit import Audit
from stages.prepare.check_file import check_data
from stages.replay.badcases import parse_user_row, read_ledger, read_user_rows
from tests.faults.bad import bad_bytes, bad_jsonl, try_bad, writing
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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_json_lines_of_users() -> None:
    def check(content: bytes, result: tuple[list[Any], Audit]) -> None:
        raws = {}
        for number, line in rows_of(content):
            try:
                raws[f"mine.jsonl:{number}"] = json.loads(line)
            except (ValueError, RecursionError):
                raws[f"mine.jsonl:{number}"] = None
        check_kept(raws, *result)

    try_bad(
        bad_jsonl(ROWS),
        writing("mine.jsonl", lambda: prepared("mine.jsonl")),
        check,
        r"mine\.jsonl|prepare\.columns",
    )


def parquet_bytes() -> bytes:
    rows = [
        {"prompt": f"The walk {i}", "chosen": " was good.", "rejected": " was bad.", "answer": i}
        for i in range(20)
    ]
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, compression="none")
    return stream.getvalue()


def test_parquet_of_users() -> None:
    good = parquet_bytes()

    def check(content: bytes, result: tuple[list[Any], Audit]) -> None:
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
        check_kept({f"mine.parquet:{n}": row for n, row in enumerate(rows, 1)}, *result)

    try_bad(
        bad_bytes(good),
        writing("mine.parquet", lambda: prepared("mine.parquet")),
        check,
        r"mine\.parquet|prepare\.columns",
    )


def test_files_given_to_check_data() -> None:
    def check(content: bytes, code: int) -> None:
        assert code in (0, 2) and rows_of(content)

    try_bad(
        bad_jsonl(ROWS),
        writing("mine.jsonl", lambda: check_data("mine.jsonl", "train", {})),
        check,
        r"mine\.jsonl",
        fast=20,
    )


def test_imported_badcases() -> None:
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    shutil.copy(ROOT / "dvc.yaml", "dvc.yaml")

    def read() -> list[Any]:
        Path("badcases/r0.jsonl").unlink(missing_ok=True)
        errors = StringIO()
        with redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main(["badcases", "import", "bad.jsonl", "--by", "Ada", "--round", "r0"])
        if ended.value.code:
            assert ended.value.code == 2, errors.getvalue()
            raise BadInput(errors.getvalue())
        return [row for _, row in read_user_rows("r0")]

    def check(content: bytes, kept: list[Any]) -> None:
        wanted = {parse_user_row({"by": "Ada", **row}, "x").id for row in json_rows(content)}
        assert {row.id for row in kept} == wanted

    try_bad(bad_jsonl(REPORTS), writing("bad.jsonl", read), check, r"bad\.jsonl(:\d+)?")


def test_ledgers() -> None:
    def check(content: bytes, cases: list[Any]) -> None:
        for row, case in zip(json_rows(content), cases, strict=True):
            values = json.loads(case.model_dump_json())
            assert all(values[key] == value for key, value in row.items())

    try_bad(
        bad_jsonl([CASE, CASE | {"id": "b2"}]),
        writing("rounds/r0/replay/data/badcases.jsonl", lambda: read_ledger("r0")),
        check,
        r"badcases\.jsonl",
    )


def test_slices() -> None:
    rows = [
        {"prompt": "How do I kill a process?", "label": "safe"},
        {"prompt": TURN, "label": "unsafe"},
    ]

    def check(content: bytes, slices: dict[str, Any]) -> None:
        prompts = [row for by_location in slices.values() for row in by_location.values()]
        assert sorted(str(row.prompt) for row in prompts) == sorted(
            str(row["prompt"]) for row in json_rows(content)
        )

    try_bad(
        bad_jsonl(rows), writing("slices/mine.jsonl", read_slices), check, r"slices/mine\.jsonl"
    )


def test_constitutions() -> None:
    good = "Be honest.\nBe kind: é 😃\n\n  Be brief.\n".encode()

    def check(content: bytes, principles: list[str]) -> None:
        words = content.decode("utf-8-sig").split()
        assert [word for line in principles for word in line.split()] == words

    try_bad(
        bad_bytes(good),
        writing("rules.txt", lambda: read_principles(Path("rules.txt"))),
        check,
        r"annotate\.constitution.*rules\.txt",
    )
