"""Numbers as text: intervals, tables, short hashes."""

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Column, Table

WIDE = 10_000  # columns; more than any table has
PADDING = (0, 1, 0, 0)  # of a cell: one space on its right
NO_BREAK = "\N{NO-BREAK SPACE}"
CUT = 10  # columns; a text that may be cut keeps at least these


def short_hash(text: str) -> str:
    """The first 8 characters of a hash or an id; a `-dirty` suffix stays."""
    name, dirty, _ = text.partition("-dirty")
    return name[:8] + dirty


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table with one line per row."""
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def interval(mean: float, low: float | None, high: float | None) -> str:
    """A mean with its interval: `0.881 [0.832, 0.923]`; the mean alone if a bound is unknown."""
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def format_number(value: Any) -> str:
    """Three digits; `-` for a missing number."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def render_text(table: Table, width: int = WIDE) -> str:
    """Render a rich table as text without colours, trailing spaces or empty lines."""
    buffer = StringIO()
    Console(file=buffer, width=width, color_system=None, markup=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())


def terminal_width() -> int | None:
    """Columns of the terminal that shows stdout. None for a pipe or a file: its lines stay whole,
    for `grep` and scripts.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def shortened(line: str, width: int | None) -> str:
    """A line that fits into a terminal of this width; None: the whole line.

    >>> shortened("a long line", 7)
    'a long…'
    >>> shortened("a long line", None)
    'a long line'
    """
    if width is None or cell_len(line) <= width:
        return line
    return f"{set_cell_size(line, width - 1)}…"


def print_json(value: Any) -> None:
    """One line of JSON, for programs; a number that is not finite is null."""
    print(json.dumps(finite(value), ensure_ascii=False))


def finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def filled(text: str, width: int | None, first: str = "", others: str = "") -> str:
    """A text whose lines break between words, but not in `commands`, which stay whole to be copied.

    Args:
        width: of the terminal; None: all in one line.
        first, others: what the first line and the others begin with.
    """
    if width is None:
        return f"{first}{text}"
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", NO_BREAK), text)
    lines = textwrap.fill(
        whole,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(NO_BREAK, " ")


def fitted_text(table: Table, width: int | None, keep: int) -> str:
    """Render a table of texts so that it fits into a terminal.

    Lines break between words, and a cell of a `no_wrap` column is cut. If a column would be too
    narrow for its longest word, the last columns are left out, and a line names them.

    Args:
        table: is changed.
        width: of the terminal, see `terminal_width`; None: all columns, and no line is broken.
        keep: number of the first columns, which are never left out. If they are too wide, their
            longest words are broken.
    """
    if width is None:
        return render_text(table)
    left_out: list[str] = []
    while len(table.columns) > keep and sum(map(narrowest, table.columns)) > space(table, width):
        left_out.insert(0, str(table.columns.pop().header))
    widths = column_widths(
        [narrowest(column) for column in table.columns],
        [widest(column) for column in table.columns],
        space(table, width),
    )
    for column, cells in zip(table.columns, widths, strict=True):
        column.width, column.overflow = cells, "ellipsis" if column.no_wrap else "fold"
    table.padding = PADDING
    note = [f"(a wider terminal shows: {', '.join(left_out)})"] if left_out else []
    return "\n".join([render_text(table, width), *note])


def space(table: Table, width: int) -> int:
    """What the terminal has for texts: each column has a line of the box and a space."""
    return width - 2 * len(table.columns) - 1


def texts(column: Column) -> list[str]:
    return [str(text) for text in (column.header, *column.cells)]


def narrowest(column: Column) -> int:
    """The width of the longest word of a column, or to which its texts may be cut; at least its own
    `min_width`.
    """
    if column.no_wrap:
        return min(widest(column), CUT)
    words = [cell_len(word) for text in texts(column) for word in text.split()]
    return max([*words, column.min_width or 1])


def widest(column: Column) -> int:
    return max(map(cell_len, texts(column)))


def column_widths(narrow: Sequence[int], wide: Sequence[int], room: int) -> list[int]:
    """Widths between those of the longest words and those of whole texts, so that all fit. Short
    texts are whole first.

    >>> column_widths([5, 7, 4], [5, 30, 12], 40)
    [5, 23, 12]
    >>> column_widths([30, 8], [30, 8], 28)
    [20, 8]
    """
    widths = list(narrow)
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    while sum(widths) < min(room, sum(wide)):
        growing = [index for index, most in enumerate(wide) if widths[index] < most]
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths
