"""Damaged text, JSON and YAML: the reason, with the line; and what is not damaged is read whole."""

import gzip
from pathlib import Path

import pytest

from stages.lib.core import reading
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.lib.core.params import check_params
from stages.lib.core.reading import parse_json, parse_yaml, read_lines, read_text
from stages.lib.core.validation import read_json_lines
from stages.replay.badcases import Report, add_user_rows, read_user_rows

DEEP = 200_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        ("[" * DEEP, "nested deeper than 100 levels"),
        ("[" * 102 + "]" * 102, "nested deeper than 100 levels"),
        ('["\\ud800"]', r"half of a surrogate pair, U\+D800"),
        (f"[{'9' * 301}]", "a number has 301 digits, more than 300"),
        (b'{"a": "\xe9"}', "not UTF-8: byte 0xe9 in line 1; save it as UTF-8"),
        (b'\xef\xbb\xbf{\n"a": "\xff"}', "not UTF-8: byte 0xff in line 2"),
        ("{", "line 1 column 2"),
    ],
)
def test_json_that_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_json_that_is_read() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": [1.5, null]}') == {"a": [1.5, None]}
    assert parse_json('["\\ud83d\\ude03", "\\ud800"]', surrogates=True) == ["😃", "\ud800"]
    assert parse_json('["\\ud83d\\ude03"]') == ["😃"]
    assert parse_json(f"[{'9' * 300}]") == [10**300 - 1]
    nested = parse_json("[" * 100 + "]" * 100)
    for _ in range(99):
        [nested] = nested
    assert nested == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3", 'line 3: found duplicate key "a"'),
        ("a:\n  'b': 1\n  b: 2", 'line 3: found duplicate key "b"'),
        ("[" * DEEP, "line 1: nested deeper than 100 levels"),
        ("a: &a [*a]", "line 1: too large with its aliases written out"),
        ("a: 1\nb: 2001-13-01", "line 2: '2001-13-01' is no timestamp"),
        ("a: !!bool maybe", "line 1: 'maybe' is no bool"),
        ("a: !!python/object/apply:os.getcwd []", "line 1: could not determine a constructor"),
        ("a: [", "line 2: did not find expected node content"),
        ("a: \0", "control characters are not allowed"),
        ("a: 1\n---\nb: 2", "line 2: but found another document"),
        (
            "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{i}: &a{i} [[{', '.join([f'*a{i - 1}'] * 10)}]]\n" for i in range(1, 9)),
            "too large with its aliases written out",
        ),
    ],
)
def test_yaml_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_yaml(text)


def test_aliases_nested_deeper_than_100_levels_are_refused() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 101))
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        parse_yaml(text)


def test_yaml_that_is_read() -> None:
    assert parse_yaml("a: 1e-05\nb: 0o17") == {"a": 1e-05, "b": 15}
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}") == {
        "a": {"b": 1},
        "c": {"b": 1},
        "d": {"b": 1, "e": 2},
    }
    assert parse_yaml("") is None


def test_lines_keep_their_numbers_and_separators_within_texts(tmp_path: Path) -> None:
    """U+2028 ends no line of JSON Lines: the file would be refused, or a report lost."""
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"text": "a\u2028b\u0085c"}])
    with path.open("a") as stream:
        stream.write("\n{\n")
    with pytest.raises(BadInput, match=r"rows\.jsonl:3: no JSON \(Expecting .*\); repair it"):
        read_json_lines(path, "repair it")
    path.write_bytes(path.read_bytes().removesuffix(b"{\n"))
    assert read_json_lines(path, "") == [(f"{path}:1", {"text": "a\u2028b\u0085c"})]


def test_a_report_with_a_line_separator_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report(prompt="The dinner", response=" was\u2028bad", by="Ada")
    assert add_user_rows("r0", [report]) == 1
    assert [row for _, row in read_user_rows("r0")] == [report]
    assert add_user_rows("r0", [report]) == 0


def test_a_damaged_archive_and_a_line_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    content = gzip.compress(b'{"a": 1}\n' * 1000)
    path.write_bytes(content[:-20])
    with pytest.raises(BadInput, match=r"rows\.jsonl\.gz:\d+: damaged \(.*\); repair it"):
        list(read_lines(path, "repair it"))
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b" " * (1 << 21)))
    with pytest.raises(BadInput, match=r"rows\.jsonl\.gz:1: the line has more than 1 MiB"):
        list(read_lines(path, ""))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * 300, "cannot be read"), ("a\0b", "cannot be read"), ("none", "none is missing: do so")],
)
def test_a_path_that_no_file_can_have(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=rf"{reason}.*do so|{reason}"):
        read_text(tmp_path / name, "do so")


@pytest.mark.parametrize("text", ["x" * 256, "a\0b", "a/" * 501, "a/" + "é" * 128])
def test_a_setting_that_no_path_can_be(text: str) -> None:
    for settings in (
        {"assets": {"model": text}},
        {"prepare": {"sources": [{"path": text}]}},
        {"evaluate": {"judges": [text]}},
    ):
        with pytest.raises(BadInput, match="no possible path or name"):
            check_params(settings, "params.yaml")


@pytest.mark.parametrize(
    "settings",
    [
        {"prepare": {"demonstration_rating": float("nan")}},
        {"ppo": {"rewards": [{"name": "a", "model": "m", "weight": float("inf")}]}},
        {"annotate": {"endpoint": {"model": "\ud800"}}},
        {"ppo": {"max_kl_per_token": 10**400}},
        {"ppo": {f"key_{number}": 1 for number in range(5000)}},
    ],
)
def test_settings_that_were_a_traceback_or_passed(settings: dict[str, object]) -> None:
    with pytest.raises(
        BadInput, match=r"params\.yaml: .*(next: correct the key|: remove it)"
    ) as raised:
        check_params(settings, "params.yaml")
    assert len(str(raised.value)) < 3000
