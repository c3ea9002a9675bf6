"""`rondo` as a user runs it: what bad input, a pipe and a file of data give."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flows import cli
from tests.servers import rondo


def test_bad_input_ends_with_2_before_anything_starts(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        """What a command that ends with 2 writes to stderr; it writes nothing else."""
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments])
        written = capsys.readouterr()
        assert (ended.value.code, written.out) == (2, "")
        return written.err

    for arguments, message in (
        (["statsu"], 'Did you mean "status"?'),
        (["statsu"], "status; next: `rondo --help`"),
        (["run", "--preset", "nope"], "no such preset"),
        (["run", "--set", "ppo.gamma=7"], "ppo.gamma"),
        (["run", "--rounds", "0"], "at least 1"),
        (["run", "--rerun", "r9"], "--rerun r9: no such round"),
        (["run", "--rounds", "1", "--set", "rounds=3"], "rounds: Input should be a valid dict"),
        (["next-round", "--set", "rounds=3"], "rounds: Input should be a valid dict"),
    ):
        assert message in refused(*arguments)
    Path("dvc.yaml").write_text(Path("dvc.yaml").read_text() + "# changed\n")
    for command in ("run", "next-round"):
        message = "these are not committed, commit them first:\nM dvc.yaml"
        assert message in refused(command, "--isolated")
    for url in ("hooks.example.org/very-secret", "http://[very-secret"):
        monkeypatch.setenv("RONDO_NOTIFY_URL", url)
        written = refused("up")
        assert "RONDO_NOTIFY_URL: expected an address" in written and "very-secret" not in written
    done = rondo(project.parent, "run")
    assert done.returncode == 2
    assert "no dvc.yaml" in done.stderr
    assert not (project / ".rondo").exists()


def test_a_reader_that_has_seen_enough_ends_it_quietly(project: Path) -> None:
    case = {
        "id": "a",
        "round": "r0",
        "cause": "human",
        "origin": "ada",
        "prompt_id": "p",
        "prompt": "The",
        "response": " x" * 30,
    }
    numbers = {"score": 0.0, "sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    ledger = project / "rounds/r0/replay/data/badcases.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text(
        "".join(json.dumps({**case, **numbers, "id": f"a{n}"}) + "\n" for n in range(2000))
    )
    listed = f"{sys.executable} -m flows.cli badcases list | head -1"
    done = subprocess.run(
        listed, shell=True, cwd=project, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_data_are_checked_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    Path("good.jsonl").write_text(json.dumps(row) + "\n")
    bad = json.dumps({**row, "chosen": ""}) + "\n"
    Path("some_bad.jsonl").write_text(json.dumps(row) + "\n" + bad)
    Path("all_bad.jsonl").write_text(bad)

    def check(file: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["check-data", file])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    code, _, errors = check("good.jsonl")
    assert (code, errors) == (0, "")
    code, output, errors = check("some_bad.jsonl")
    assert (code, errors) == (0, "") and "some_bad.jsonl:2: `chosen` is empty" in output
    code, output, errors = check("all_bad.jsonl")
    assert (code, errors) == (2, "") and "0 of them can be used" in output
    code, _, errors = check("none.jsonl")
    assert code == 2 and "none.jsonl: expected a file" in errors
