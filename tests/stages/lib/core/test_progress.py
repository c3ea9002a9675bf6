"""Lines about long passes, by a clock that the test sets."""

import threading

import pytest

from stages.lib.core import progress as progress_module
from stages.lib.core.progress import (
    PROGRESS,
    Reporter,
    print_line,
    progress,
    reporting,
    tracked,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[Reporter, Clock, list[str]]:
    clock, lines = Clock(), list[str]()
    return Reporter("sft@r0", lines.append, quiet=10.0, clock=clock), clock, lines


def test_a_short_pass_prints_nothing_and_a_long_one_a_line_every_ten_seconds() -> None:
    reporter, clock, lines = watched()
    sampling = reporter.begin("sampling", 80, "tokens")
    for second in range(1, 26):  # 2 tokens per second
        clock.now = 1000.0 + second
        sampling.add(2)
        if second == 9:
            assert lines == []
    assert lines == [
        "[sft@r0] sampling 20/80 tokens  eta 0:30",
        "[sft@r0] sampling 40/80 tokens  eta 0:20",
    ]


def test_while_an_item_takes_long_the_time_that_is_left_runs_down() -> None:
    reporter, clock, lines = watched()
    gradients = reporter.begin("gradients", 4, "micro-batches")
    clock.now += 20
    gradients.add()  # 60 s for the other three
    for _ in range(4):
        clock.now += 20
        reporter.tick()
    assert [line.rpartition("  ")[2] for line in lines] == [
        "eta 1:00",
        "eta 0:40",
        "eta 0:20",
        "eta 0:00",
        "eta 0:00",
    ]


def test_any_other_line_puts_the_next_one_off() -> None:
    reporter, clock, lines = watched()
    clock.now += 9
    reporter.printed()
    clock.now += 9
    reporter.tick()
    assert lines == []
    clock.now += 1
    reporter.tick()
    assert lines == ["[sft@r0] working  for 0:10"]


def test_the_innermost_pass_is_named_first_and_then_those_around_it() -> None:
    reporter, clock, _ = watched()
    around = reporter.begin("epoch 1:", 4, "mini-batches")
    around.add(1)
    clock.now += 50
    reporter.begin("gradients", 8, "micro-batches")
    assert reporter.line() == (
        "[sft@r0] gradients 0/8 micro-batches  eta ?  epoch 1: 1/4 mini-batches"
    )
    reporter.begin("loading assets/model", 0, "rows")
    clock.now += 65
    assert reporter.line() == (
        "[sft@r0] loading assets/model  for 1:05  gradients 0/8 micro-batches"
        "  epoch 1: 1/4 mini-batches"
    )


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("[ppo@r0] step 5/20  eta 3:05  kl 2", ("step", "5", "20", None, "3:05", None, "kl 2")),
        (
            "[sft@r0] sampling 20/80 tokens  eta 0:30  base model",
            ("sampling", "20", "80", "tokens", "0:30", None, "base model"),
        ),
        (
            "[sft@r0] epoch 1: 0/4 mini-batches  eta ?",
            ("epoch 1:", "0", "4", "mini-batches", "?", None, None),
        ),
        (
            "[run] loading a/b  for 61:05  base model",
            ("loading a/b", None, None, None, None, "61:05", "base model"),
        ),
    ],
)
def test_the_format_is_read_back(line: str, fields: tuple[str | None, ...]) -> None:
    match = PROGRESS.match(line)
    assert match
    names = ("what", "done", "total", "unit", "eta", "elapsed", "details")
    assert tuple(match[name] for name in names) == fields


@pytest.mark.parametrize(
    "line", ["some library: step 5/20", "[sft@r0] 5 pairs", "[sft@r0] step 1/?  eta 0:00  a"]
)
def test_other_lines_are_no_progress(line: str) -> None:
    assert not PROGRESS.match(line)


def test_passes_end_in_any_order_and_after_an_error() -> None:
    lines: list[str] = []
    with reporting("sft@r0", lines.append, quiet=float("inf")) as reporter:
        first = tracked("first", [1, 2], 2)
        next(first)
        with pytest.raises(ValueError, match="no"), progress("second"):
            assert [one.what for one in reporter.passes] == ["first", "second"]
            raise ValueError("no")
        second = tracked("third", [1], 1)
        next(second)
        assert list(first) == [2]
        assert [one.what for one in reporter.passes] == ["third"]
        assert list(second) == []
        assert reporter.passes == []


def test_an_item_is_done_when_the_next_one_is_requested() -> None:
    lines: list[str] = []
    with reporting("sft@r0", lines.append, quiet=0.0):
        assert list(tracked("reading", iter("ab"), 2)) == ["a", "b"]
    assert [line.partition("  ")[0] for line in lines] == [
        "[sft@r0] reading 1/2 rows",
        "[sft@r0] reading 2/2 rows",
    ]


def test_a_pass_that_cannot_print_by_itself_is_reported_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "TICK_SECONDS", 0.001)
    lines, reported = list[str](), threading.Event()

    def emit(line: str) -> None:
        lines.append(line)
        reported.set()

    with reporting("sft@r0", emit, quiet=0.0), progress("loading assets/model"):
        reported.clear()
        assert reported.wait(60)
        assert threading.active_count() > 1
    assert lines[-1] == "[sft@r0] loading assets/model  for 0:00"


def test_only_the_innermost_block_reports_and_its_lines_count_for_the_outer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "TICK_SECONDS", 0.001)
    outer_lines, inner_lines, reported = list[str](), list[str](), threading.Event()
    with reporting("run", outer_lines.append, quiet=0.0) as outer:
        with reporting("sft@r0", lambda line: (inner_lines.append(line), reported.set()), 0.0):
            outer_lines.clear()
            reported.clear()
            assert reported.wait(60)
            assert outer_lines == []
            outer.last_line = 0.0
        assert outer.last_line > 0.0
    # silence is counted from the last line, whichever block printed it
    with reporting("run", quiet=float("inf")) as outer:
        outer.last_line = 5.0
        with reporting("sft@r0", quiet=float("inf")) as inner:
            assert inner.last_line == 5.0
        assert outer.last_line == 5.0
    with reporting("sft@r0", quiet=float("inf")) as reporter:
        reporter.last_line = 0.0
        print_line("a step")
        assert reporter.last_line > 0.0


def test_without_reporting_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("sampling", 2) as sampling:
        sampling.add(2)
    assert capsys.readouterr().out == ""
