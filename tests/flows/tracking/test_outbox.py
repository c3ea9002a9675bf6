"""Records that wait for MLflow: order, rejections, outages, and files of older versions."""

import math
import time
from pathlib import Path

import pytest

from flows.tracking.outbox import TRIES, Outbox
from flows.tracking.records import Record, Step


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox[Record]:
    return Outbox(tmp_path / "outbox", Record)


def record(run: str, steps: list[Step] | None = None) -> Record:
    return Record(run=run, started=1, ended=2, steps=steps or [])


class Mlflow:
    """Takes records, but for those of the runs in `rejects`, none while it is down, and none of the
    runs in `fails`, on which it fails itself.
    """

    def __init__(self, *rejects: str, down: bool = False, fails: tuple[str, ...] = ()) -> None:
        self.rejects, self.down, self.fails = rejects, down, fails
        self.runs = list[str]()

    def send(self, record: Record) -> None:
        if self.down:
            raise ConnectionError("no answer")
        if record.run in self.rejects:
            raise ValueError(f"{record.run} is refused")
        if record.run in self.fails:
            raise BrokenPipeError(f"no room for {record.run}")
        self.runs.append(record.run)

    def is_reachable(self) -> bool:
        return not self.down

    def may_pass(self, error: Exception) -> bool:
        return isinstance(error, BrokenPipeError)


def send(outbox: Outbox[Record], mlflow: Mlflow) -> list[str]:
    return list(outbox.send(mlflow.send, mlflow.is_reachable, mlflow.may_pass))


def test_records_are_sent_once_in_the_order_in_which_they_were_added(
    outbox: Outbox[Record],
) -> None:
    for run in ("b", "a", "c"):
        outbox.add(record(run))
    mlflow = Mlflow()
    assert send(outbox, mlflow) == send(outbox, mlflow) == []
    assert mlflow.runs == ["b", "a", "c"]


def test_values_that_are_no_numbers_come_back_as_they_were(outbox: Outbox[Record]) -> None:
    values = [math.nan, math.inf, -math.inf, 0.1]
    steps = [Step(key="grad_norm", value=value, time=1, step=1) for value in values]
    outbox.add(record("diverged", steps))
    sent: list[Record] = []
    assert list(outbox.send(sent.append, lambda: True, lambda _: False)) == []
    assert [str(step.value) for step in sent[0].steps] == ["nan", "inf", "-inf", "0.1"]


def test_during_an_outage_all_records_stay(outbox: Outbox[Record]) -> None:
    for run in ("a", "b"):
        outbox.add(record(run))
    for _ in range(TRIES + 1):
        with pytest.raises(ConnectionError, match="no answer"):
            send(outbox, Mlflow(down=True))
    mlflow = Mlflow()
    send(outbox, mlflow)
    assert mlflow.runs == ["a", "b"]


def test_a_record_on_which_the_server_fails_stays_and_two_of_them_end_the_try(
    outbox: Outbox[Record],
) -> None:
    """E.g. since its disk is full. The first may be a record that no server takes."""
    for run in ("large", "a", "huge", "b"):
        outbox.add(record(run))
    mlflow = Mlflow(fails=("large", "huge"))
    for _ in range(TRIES + 1):
        with pytest.raises(BrokenPipeError):
            send(outbox, mlflow)
    assert mlflow.runs == ["a"]
    mlflow = Mlflow()
    assert send(outbox, mlflow) == [] and mlflow.runs == ["large", "huge", "b"]


def test_records_keep_their_order_if_the_clock_is_set_back(
    outbox: Outbox[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    for run, hours in (("a", 0), ("b", -24), ("c", -48), ("d", 1)):
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: now + hours * 3600 * 10**9)
        outbox.add(record(run))
    mlflow = Mlflow()
    send(outbox, mlflow)
    assert mlflow.runs == ["a", "b", "c", "d"]


def test_a_record_that_is_rejected_holds_up_no_other_and_is_kept_with_the_reason(
    outbox: Outbox[Record],
) -> None:
    outbox.add(record("bad"))
    outbox.add(record("good"))
    mlflow = Mlflow("bad")
    for _ in range(TRIES - 1):
        assert send(outbox, mlflow) == []
        assert len(outbox.waiting()) == 1
    assert mlflow.runs == ["good"]
    (message,) = send(outbox, mlflow)
    (kept,) = outbox.rejected.glob("*.json")
    (reason,) = outbox.rejected.glob("*.txt")
    assert str(kept) in message and "bad is refused" in message
    assert Record.model_validate_json(kept.read_bytes()) == record("bad")
    assert reason.read_text() == "ValueError: bad is refused\n"
    assert outbox.waiting() == send(outbox, mlflow) == []


def test_a_rejection_that_passes_is_forgotten(outbox: Outbox[Record]) -> None:
    """E.g. a promotion whose evaluation was not recorded yet."""
    outbox.add(record("early"))
    send(outbox, Mlflow("early"))
    mlflow = Mlflow()
    send(outbox, mlflow)
    assert mlflow.runs == ["early"]
    assert not outbox.rejected.exists()


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b'{"run": "r", "started": 1', b"[1]"])
def test_a_file_that_is_no_record_is_put_aside_at_once(
    outbox: Outbox[Record], content: bytes
) -> None:
    outbox.folder.mkdir()
    (outbox.folder / "0-torn.0.json").write_bytes(content)
    outbox.add(record("good"))
    mlflow = Mlflow()
    (message,) = send(outbox, mlflow)
    assert "not a record" in message
    assert mlflow.runs == ["good"]
    assert [path.read_bytes() for path in outbox.rejected.glob("*.json")] == [content]


def test_the_file_of_older_versions_is_taken_over(outbox: Outbox[Record], tmp_path: Path) -> None:
    old = tmp_path / "unsent.jsonl"
    lines = [record(run).model_dump_json() for run in ("a", "b\u2028")]
    old.write_text("\n".join([*lines, '{"torn', ""]), encoding="utf-8")
    outbox.take_over(old)
    outbox.take_over(old)  # it is not there any more
    mlflow = Mlflow()
    assert len(send(outbox, mlflow)) == 1
    assert mlflow.runs == ["a", "b\u2028"]
    assert not old.exists()
