"""The log of episodes: its files, and a log that is opened at an earlier position."""

import gzip
import json

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.rows import RolloutRow
from stages.lib.data.rollouts import RolloutLog, read_rollouts

ROW: RolloutRow = {
    "update": 0,
    "id": "a",
    "prompt": "The sky",
    "response": " is blue",
    "score": 1.0,
    "reward": 1.0,
    "judge_score": 0.5,
    "kl": 0.1,
    "finish_reason": "stop",
    "length": 3,
}


def rows(*numbers: int) -> list[RolloutRow]:
    return [{**ROW, "update": number} for number in numbers]


def test_appends_make_one_file_until_it_is_full(tmp_path):
    log = RolloutLog(tmp_path, full=1)
    log.append(rows(1, 2))
    log.append(rows(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00001.jsonl.gz", "00002.jsonl.gz"]
    assert list(read_rollouts(tmp_path)) == rows(1, 2, 3)
    with gzip.open(tmp_path / "00001.jsonl.gz", "rt") as lines:
        assert [json.loads(line) for line in lines] == rows(1, 2)


@pytest.mark.parametrize("full", [1, 1 << 20])
def test_a_log_opened_at_an_earlier_position_continues_from_there(tmp_path, full):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    log = RolloutLog(whole, full=full)
    for number in range(4):
        log.append(rows(number))
    log = RolloutLog(killed, full=full)
    log.append(rows(0))
    log.append(rows(1))
    saved = log.position
    log.append(rows(7))  # written after the last saved state
    log = RolloutLog(killed, saved, full=full)
    log.append(rows(2))
    log.append(rows(3))
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == {
        path.name: path.read_bytes() for path in killed.iterdir()
    }


def test_a_log_that_is_shorter_than_its_saved_position_is_refused(tmp_path):
    """Not filled with zeros: a disk lost bytes that the saved state refers to."""
    log = RolloutLog(tmp_path / "ppo/rollouts")
    log.append(rows(1))
    number, size = log.position
    log.path.write_bytes(log.path.read_bytes()[:-1])
    with pytest.raises(BadInput, match=rf"jsonl\.gz: {size - 1} bytes, .* {size} .*rm -r .*/ppo`"):
        RolloutLog(log.folder, (number, size))
    assert log.path.stat().st_size == size - 1


def test_a_missing_log_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(BadInput, match="dvc repro ppo@r0"):
        list(read_rollouts(tmp_path / "rounds/r0/ppo/rollouts"))


def test_rows_are_read_one_at_a_time(tmp_path):
    log = RolloutLog(tmp_path, full=1)
    log.append(rows(1))
    log.append([{key: value for key, value in rows(2)[0].items() if key != "finish_reason"}])
    reading = read_rollouts(tmp_path)
    assert next(reading) == rows(1)[0]
    with pytest.raises(BadInput, match=r"00002\.jsonl\.gz: row 1: finish_reason: Field required;"):
        next(reading)
