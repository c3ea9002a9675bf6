"""Numbers as text: intervals, tables, short hashes."""

from collections.abc import Iterable
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table


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


def render_text(table: Table) -> str:
    """Render a rich table as text without colours, trailing spaces or empty lines."""
    buffer = StringIO()
    Console(file=buffer, width=200, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())
