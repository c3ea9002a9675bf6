"""Files are written completely or not at all, missing ones are named, and clocks stay untracked."""

import csv
import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, read_json, read_jsonl, write_jsonl, write_text
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.types import StepMetrics


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    for read in (read_json, read_jsonl):
        with pytest.raises(BadInput, match="run `dvc repro sft@r0`"):
            read(tmp_path / "none.json", "dvc repro sft@r0")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    texts = [letter * 100_000 for letter in "abcdefgh"]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(20):
            list(pool.map(lambda text: write_text(tmp_path / "text", text), texts))
    assert [file.name for file in tmp_path.iterdir()] == ["text"]
    assert (tmp_path / "text").read_text() in texts


def test_jsonl_keeps_unicode_line_separators_within_a_row(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b 😃"}, {"text": "c"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert read_jsonl(tmp_path / "rows.jsonl", "") == rows


def test_hash_of_a_file_is_sha256_and_of_a_folder_depends_on_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("hello")
    assert file_hash(tmp_path / "a/x") == hashlib.sha256(b"hello").hexdigest()
    before = file_hash(tmp_path / "a")
    (tmp_path / "a/x").rename(tmp_path / "a/y")
    assert file_hash(tmp_path / "a") != before


def test_the_eta_is_not_negative_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder, now = MetricLogger("sft", "r0", total_steps=2), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 24 * 3600)
    recorder.log(1, {"loss": 2.0}, ["loss"])
    assert "step 1/2  eta 0:00  loss 2" in capsys.readouterr().out


def test_the_eta_of_a_step_before_the_resume_is_not_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an engine's job, whose policies are validated when all updates have been logged."""
    monkeypatch.chdir(tmp_path)
    steps: list[StepMetrics] = [{"step": 1, "kl": 0.1}, {"step": 3, "kl": 0.2}]
    recorder = MetricLogger("ppo", "r0", total_steps=3, logged_steps=steps)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    recorder.log_progress(1, "validated")
    assert "step 1/3  eta 0:00  validated" in capsys.readouterr().out


def test_recorder_keeps_the_clock_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = MetricLogger("sft", "r0", total_steps=4)
    recorder.log(1, {"loss": 2.0}, ["loss"])
    recorder.log(2, {"loss": 1.5, "kl": 0.5})
    recorder.finish({"loss_after": 1.5})
    assert [
        json.loads(line) for line in Path("rounds/r0/sft/metrics.jsonl").read_text().splitlines()
    ] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.5, "kl": 0.5},
    ]
    assert [
        json.loads(line)["step"]
        for line in Path(".rondo/work/r0/sft/clock.jsonl").read_text().splitlines()
    ] == [-1, 1, 2]
    with Path("rounds/r0/sft/curves.csv").open() as stream:
        assert list(csv.DictReader(stream)) == [
            {"step": "1", "kl": "", "loss": "2.0"},
            {"step": "2", "kl": "0.5", "loss": "1.5"},
        ]
    assert json.loads(Path("rounds/r0/sft/metrics.json").read_text()) == {"loss_after": 1.5}
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("[sft@r0] step 1/4  eta 0:0") and first.endswith("loss 2")


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("rounds/r0/sft/manifest.json", "dvc repro sft@r0"),
        ("/home/me/rondo/rounds/r10/ppo/rollouts/00001.jsonl.gz", "dvc repro ppo@r10"),
        (".rondo/work/r1/evaluate/params.json", "dvc repro evaluate@r1"),
        ("assets/model/config.json", "dvc repro assets"),
        ("assets/inputs/data.json", "dvc repro inputs"),
        ("elsewhere/rows.jsonl", "dvc repro"),
    ],
)
def test_a_missing_file_names_the_stage_that_makes_it(
    path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=f"run `{command}`"):
        read_json(Path(path))
