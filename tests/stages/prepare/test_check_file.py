"""`rondo check-data` on small files, and the schema of a row."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow
import pyarrow.parquet
import pytest

from stages.lib.core.errors import BadInput
from stages.prepare.check_file import check_data
from stages.prepare.turns import Defect, Tie
from tests.paths import ROOT
from tests.stages.prepare.rows import becomes

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


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "mine.jsonl", [*PAIRS, {"unknown": 1}])
    assert check_data(file, "train", {}, as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["usable"]) == (len(PAIRS) + 1, len(PAIRS))
    [bad] = result["bad"]
    assert bad["where"].endswith(f"mine.jsonl:{len(PAIRS) + 1}") and bad["defect"]
    assert len(result["about"]["form"]) == 2 and "kind" in result["about"]


def test_a_clean_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        *PAIRS[:-1],
        {**PAIRS[-1], "margin": 2},
        TALK,
        *({"prompt": f"Say {i}", "completion": f"{i}!"} for i in range(4)),
    ]
    assert check_data(write(tmp_path / "mine.jsonl", rows), "train", {}) == 0
    output = capsys.readouterr().out
    for text in (
        "mine.jsonl: 65 rows, 65 of them can be used",
        "  form       TRL preference, explicit prompt (61): becomes a pair; ",
        "             TRL prompt-completion (4): becomes a demonstration",
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
    assert check_data(file, "train", {}) == 0
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
    assert check_data(str(tmp_path / "mine.parquet"), "train", {}) == 0
    assert "60 rows, 60 of them can be used" in capsys.readouterr().out


def test_ignored_columns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**PAIRS[0], "answer": "42", "note": None}, {**PAIRS[1], "answer": "41", "\ud83d": 3}]
    assert check_data(write(tmp_path / "mine.jsonl", rows), "train", {}) == 0
    assert "ignored    columns answer (2), ? (1)" in capsys.readouterr().out


def test_the_rows_are_shown_with_the_line_for_params(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model sees them: in a project, in its prompt format."""
    monkeypatch.chdir(tmp_path)
    rows = [{"q": "Sky?", "a": {"good": "Blue.", "bad": "Red."}, "n": 1}] * 5
    file = write(tmp_path / "mine.jsonl", rows)
    columns = {"prompt": "q", "chosen": "a.good", "rejected": "a.bad"}
    assert check_data(file, "train", columns) == 0
    output = capsys.readouterr().out
    listed = "columns: {prompt: q, chosen: a.good, rejected: a.bad}"
    assert f"  params     prepare.sources: [{{path: {file}, {listed}}}]" in output
    assert "the first, as with prepare.prompt_format plain\n" in output
    assert output.count("               prompt     'Sky?'\n") == 3
    assert "               rejected   'Red.'\n" in output
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    text = (tmp_path / "params.yaml").read_text()
    chat = text.replace("prompt_format: plain", "prompt_format: chat")
    assert chat != text
    (tmp_path / "params.yaml").write_text(chat)
    check_data(file, "train", columns)
    assert "prompt_format plain (no assets/model yet" in capsys.readouterr().out


def test_what_the_chat_template_of_the_project_refuses(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("prompt_format: plain", "prompt_format: chat"))
    model = workspace / "assets/model"
    copy = workspace / "copy"
    shutil.copytree(model, copy)
    model.unlink()
    shutil.move(copy, model)
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    rest = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template + rest)
    rows = [{"system": "Be brief.", **PAIRS[0]}, PAIRS[1]]
    file = write(workspace / "mine.jsonl", rows)
    assert check_data(file, "train", {}) == 0
    output = capsys.readouterr().out
    assert "2 rows, 1 of them can be used" in output
    assert f"{file}:1: the chat template refuses the prompt: no system" in output
    assert "               prompt     '<user> Question 1?'\n" in output


def test_an_unknown_form_has_its_keys_the_nearest_form_and_a_mapping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": "2 + 2?", "preferred": "4", "dispreferred": "5", "id": 1}]
    assert check_data(write(tmp_path / "mine.jsonl", rows), "train", {}) == 2
    output = capsys.readouterr().out
    assert "unknown form, with the keys problem, preferred, dispreferred, id." in output
    mapping = "e.g. {chosen: preferred, prompt: problem, rejected: dispreferred}"
    assert mapping in output
    rows = [{"prompt": "2 + 2?", "response_0": "4", "response_1": "5"}]
    check_data(write(tmp_path / "mine.jsonl", rows), "train", {})
    nearest = "The nearest is PKU-SafeRLHF, without `better_response_id`."
    assert nearest in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "expected a file"),
        ("mine.csv", "no rows"),
        ("mine.txt", "expected a file"),
        ("empty.jsonl", "no rows"),
    ],
)
def test_a_file_without_rows(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.csv").write_text("a,b\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadInput, match=message):
        check_data(str(tmp_path / name), "train", {})


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
        becomes(row)
    for row in BAD:
        with pytest.raises(Defect) as caught:
            becomes(row)
        assert not isinstance(caught.value, Tie)
