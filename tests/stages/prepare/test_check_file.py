"""`rondo check-data` on small files, and the schema of a row."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow
import pyarrow.parquet
import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params.shared import PromptFormat
from stages.prepare.check_file import check_file
from stages.prepare.formats import Defect, Tie, normalise
from tests.paths import ROOT

SCHEMA = ROOT / "docs/data.schema.json"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


PAIRS = [
    {"prompt": f"Question {i}?", "chosen": f" Good answer {i}.", "rejected": f" Bad {i}."}
    for i in range(60)
]
TALK = {
    "prompt": [user("Hi"), assistant("Hello"), user("Sky?")],
    "chosen": [assistant("Blue, sure.")],
    "rejected": [assistant("Green.")],
}


def test_a_clean_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        *PAIRS[:-1],
        {**PAIRS[-1], "margin": 2},
        TALK,
        *({"prompt": f"Say {i}", "completion": f"{i}!"} for i in range(4)),
    ]
    assert check_file(write(tmp_path / "mine.jsonl", rows)) == 0
    output = capsys.readouterr().out
    for text in (
        "mine.jsonl: 65 rows, 65 of them can be used",
        "standard preference, explicit prompt (60); standard prompt-completion (4);"
        " conversational preference, explicit prompt (1)",
        "61 pairs, 4 demonstrations",
        "in 1 of 61 pairs",
        "1.5% of the prompts have more",
        "chosen     words 3 / 3 / 3 / 3, characters 14 / 15 / 15 / 15"
        " (5% / median / 95% / longest)",
        "longest wins 1.00: lengths alone predict the label",
        "words of chosen texts: good",
    ):
        assert text in output, text


def test_every_bad_row_is_listed_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = {**PAIRS[0], "chosen": PAIRS[0]["rejected"], "rejected": PAIRS[0]["chosen"]}
    bad = [
        "{no",
        {**PAIRS[2], "margin": 0},
        {**PAIRS[3], "chosen": ""},
        {**PAIRS[4], "chosen": "\ud83d"},
        {**PAIRS[5], "chosen": ""},
    ]
    file = write(tmp_path / "mine.jsonl", [PAIRS[0], *bad, swapped, PAIRS[1]])
    assert check_file(file) == 2
    output = capsys.readouterr().out.splitlines()
    assert f"{file}: 8 rows, 1 of them can be used" in output
    assert "7 rows are bad:" in output
    assert "  2          `chosen` is empty" in output and "  2          contradiction" in output
    lines = [line.removeprefix(f"{file}:") for line in output if line.startswith(f"{file}:")][1:]
    assert [line.split(":")[0] for line in lines] == ["2", "3", "4", "5", "6", "1", "7"]
    assert lines[1] == "3: `margin` is 0"
    assert lines[-1] == f"7: contradiction: {file}:1 prefers the other text"
    assert any("too few pairs (3)" in line for line in output)


def test_parquet_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), tmp_path / "mine.parquet")
    assert check_file(str(tmp_path / "mine.parquet")) == 0
    assert "60 rows, 60 of them can be used" in capsys.readouterr().out


def test_ignored_columns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**PAIRS[0], "answer": "42", "note": None}, {**PAIRS[1], "answer": "41", "\ud83d": 3}]
    assert check_file(write(tmp_path / "mine.jsonl", rows)) == 0
    assert "ignored    columns answer (2), ? (1)" in capsys.readouterr().out


@pytest.mark.parametrize("text", [json.dumps(PAIRS), json.dumps(PAIRS, indent=1)])
def test_a_json_array_is_named_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    with pytest.raises(BadInput, match=r"mine\.jsonl:1: a JSON array; .*jq -c"):
        check_file(str(tmp_path / "mine.jsonl"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "expected a file"),
        ("mine.csv", "expected a file"),
        ("empty.jsonl", "no rows"),
    ],
)
def test_a_file_without_rows(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.csv").write_text("a,b\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadInput, match=message):
        check_file(str(tmp_path / name))


TRANSCRIPT = "\n\nHuman: Sky?\n\nAssistant:"
GOOD: list[Any] = [
    PAIRS[0],
    {**PAIRS[0], "margin": 0.5, "id": 7, "source": "people"},
    {**PAIRS[0], "margin": None},
    {"chosen": "The sky is blue", "rejected": "The sky is green", "prompt": None},
    {"chosen": TRANSCRIPT + " Blue.", "rejected": TRANSCRIPT + " Green."},
    {"prompt": TRANSCRIPT, "chosen": " Blue.", "rejected": " Green."},
    TALK,
    {
        "chosen": [*TALK["prompt"], *TALK["chosen"]],
        "rejected": [*TALK["prompt"], *TALK["rejected"]],
    },
    {"prompt": [{"role": "system", "content": "Be brief."}, user("Sky?")], "completion": "Blue."},
    {"prompt": "### Instruction: Sky?\n### Response:", "completion": " Blue."},
]
BAD: list[Any] = [
    "text",
    {"text": "The sky is blue."},
    {"prompt": "Sky?", "chosen": "Blue."},
    {**PAIRS[0], "chosen": 3},
    {**PAIRS[0], "chosen": "  \n"},
    {**PAIRS[0], "rejected": []},
    {**PAIRS[0], "margin": -1},
    {**PAIRS[0], "margin": "2"},
    {**PAIRS[0], "chosen": "Blue.\n\nHuman: And?"},
    {**PAIRS[0], "chosen": "<|im_start|>Blue."},
    {**PAIRS[0], "chosen": "a\x00b"},
    {**TALK, "chosen": [user("Blue.")]},
    {"prompt": [{"role": "tool", "content": "x"}], "completion": "y"},
    {"prompt": [user(" "), assistant("x"), user("y")], "completion": "z"},
    {"prompt": [{"role": "user"}], "completion": "z"},
    {"prompt": "", "completion": "z"},
]


def test_the_schema_and_prepare_agree_on_what_a_row_is() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert [row for row in GOOD if not validator.is_valid(row)] == []
    assert [row for row in BAD if validator.is_valid(row)] == []
    for row in GOOD:
        normalise(row, PromptFormat.plain)
    for row in BAD:
        with pytest.raises(Defect) as caught:
            normalise(row, PromptFormat.plain)
        assert not isinstance(caught.value, Tie)
