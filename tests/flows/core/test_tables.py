"""Tables in terminals of 80 and 120 columns, and in a pipe."""

import os
import pty
import subprocess
import sys

import pytest
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.tables import column_widths, filled, fitted_text, render_text

HEADER = ("run", "policy", "win rate against SFT [95%]", "KL, nats per token", "judge score", "git")
ROW = ("20261129-214513-0123abcd", "checkpoints/step_00009", "0.864 [0.818, 0.906]", "0.55")


def table(*rows: tuple[str, ...], cut: int | None = None) -> Table:
    made = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(HEADER):
        made.add_column(column, no_wrap=number == cut)
    for row in rows:
        made.add_row(*row, *[""] * (len(HEADER) - len(row)))
    return made


def words(text: str) -> set[str]:
    return set(text.split())


@pytest.mark.parametrize(("width", "shown"), [(80, 5), (120, 6)])
def test_a_table_fits_without_broken_words(width: int, shown: int) -> None:
    text = fitted_text(table((*ROW, "0.7", "c0ffee")), width, keep=4)
    assert max(map(len, text.splitlines())) <= width
    assert words(" ".join(ROW)) <= words(text)
    assert ("c0ffee" in text) == (shown == 6)
    assert ("(a wider terminal shows: git)" in text) == (shown == 5)


def test_a_pipe_gets_whole_lines() -> None:
    """However long: `grep` finds each text, and each row is one line."""
    long = "word " * 60
    lines = fitted_text(table(ROW, (long, "x")), None, keep=1).splitlines()
    assert len(lines) == 4 and long.strip() in lines[3]


def test_a_text_that_may_be_cut_stays_in_one_line() -> None:
    text = fitted_text(table(("a", "word " * 60), cut=1), 80, keep=6)
    assert max(map(len, text.splitlines())) <= 80
    [line] = [line for line in text.splitlines() if "word" in line]
    assert "…" in line and words(line) - {"a", "word"} <= {"…", "w…", "wo…", "wor…", "word…"}


def test_words_are_broken_only_if_nothing_can_be_left_out() -> None:
    text = fitted_text(table(("h" * 100, "b" * 30)), 80, keep=len(HEADER))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("h") >= 100 and text.count("b") >= 30


def test_widths_by_hand() -> None:
    assert column_widths([3, 4], [3, 9], 20) == [3, 9]  # all is there, nothing is added
    assert column_widths([3, 4], [3, 9], 9) == [3, 6]
    assert column_widths([12, 4], [12, 4], 10) == [6, 4]


def test_a_text_in_brackets_is_no_markup() -> None:
    assert "[bold]x" in render_text(table(("[bold]x",)))


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_is_as_wide_as_it_is(columns: int) -> None:
    """In a pseudo-terminal; the same program in a pipe has no width."""
    program = [
        sys.executable,
        "-c",
        "from flows.core import tables; print(tables.terminal_width())",
    ]
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    piped = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    assert piped.stdout == "None\n"
    reader, writer = pty.openpty()
    try:
        subprocess.run(["stty", "cols", str(columns)], stdin=writer, check=True)
        subprocess.run(program, stdout=writer, check=True, env=environment)
        assert os.read(reader, 100).split() == [str(columns).encode()]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_command_is_in_one_line_to_be_copied() -> None:
    text = "It learnt too little. Try first: `rondo run --set sft.max_steps=8`. Also at fault: PPO"
    assert filled(text, 30).splitlines() == [
        "It learnt too little. Try",
        "first:",
        "`rondo run --set sft.max_steps=8`.",
        "Also at fault: PPO",
    ]
    assert filled(text, None) == text
