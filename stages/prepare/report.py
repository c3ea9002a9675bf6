"""reports/<round>/data.html: what prepare found, on one page that asks for nothing from outside."""

from typing import Any

from stages.lib.core.html import render_page
from stages.lib.core.types import Row
from stages.prepare.formats import source_texts

SHOWN = 5  # examples of a cause
# What happened to the rows of a cause, and what to do. Causes that are not here (of the embedded
# data) say it themselves.
EXPLAINED = {
    "bad row": "cannot be read as demonstration or pair; mend them",
    "tie": "the pair names no better text, so that a reward model has nothing to learn from it",
    "contradiction": "another pair says the opposite of the same two texts: one must be wrong, so both are left out",
    "exact duplicate": "equal to an earlier row, but for case and white space",
    "near duplicate": "prompt and answers share most of their word 3-grams with an earlier row's (prepare.near_duplicate)",
    "leak": "13 words in a row, or nearly the whole text, are in an evaluation text; left out of the training set that is named",
    "prompt is held out": "its prompt is an evaluation prompt, or goes on from one",
}


def page(report: dict[str, Any], round_: str) -> str:
    """The page of a report as written to data.json."""
    filters = {
        "texts": texts,
        "percent": lambda share: f"{share:.1%}",
        "number": lambda value: f"{value:,.6g}",
    }
    return render_page(
        "stages.prepare",
        "data.html.jinja",
        filters,
        report=report,
        round=round_,
        shown=SHOWN,
        explained=EXPLAINED,
    )


def texts(row: Row) -> list[tuple[str, str]]:
    """The row's texts with their names, the prompt as a transcript where it is a conversation."""
    names = ["prompt", *(name for name in ("completion", "chosen", "rejected") if name in row)]
    return list(zip(names, source_texts(row), strict=True))
