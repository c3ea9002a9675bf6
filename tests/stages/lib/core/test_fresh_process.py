"""Modules run in processes of their own."""

from pathlib import Path

import pytest

from stages.lib.core.errors import RondoError
from stages.lib.core.fresh_process import run_in_fresh_process


def test_the_last_line_is_read_as_json_to_the_last_bit(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[0.1, 5e-324, {"text": "caf\\u00e9\\u2028\\n"}]')
    assert run_in_fresh_process("json.tool", "--compact", file, failing="it") == [
        0.1,
        5e-324,
        {"text": "caf\u00e9\u2028\n"},
    ]


def test_the_error_of_a_failed_module_has_its_meaning_and_its_cause(tmp_path: Path) -> None:
    with pytest.raises(
        RondoError, match=r"the policy is lost: (.|\n)*No such file or directory: '.*rows.json'"
    ):
        run_in_fresh_process("json.tool", tmp_path / "rows.json", failing="the policy is lost")


def test_a_module_works_alone_also_if_several_processes_share_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranks.py").write_text(
        "import os\n"
        "left = ('RANK', 'ELASTIC', 'AGENT')\n"
        "print([name for name in os.environ if any(word in name for word in left)])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "RONDO_AGENT"):
        monkeypatch.setenv(name, "1")
    assert run_in_fresh_process("ranks", failing="it") == []


def test_lines_of_progress_are_printed_and_are_no_part_of_the_result_or_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "[evaluate@r0] sampling 20/80 tokens  eta 0:30"
    (tmp_path / "slow.py").write_text(
        "import sys\n"
        f"print({line!r}, file=sys.stderr)\n"
        "print('a warning', file=sys.stderr)\n"
        "print(42)\n"
        "sys.exit(sys.argv[1:] == ['fail'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_in_fresh_process("slow", failing="it") == 42
    assert capsys.readouterr().out == f"{line}\n"
    with pytest.raises(RondoError) as caught:
        run_in_fresh_process("slow", "fail", failing="it")
    assert str(caught.value) == "it: a warning"
