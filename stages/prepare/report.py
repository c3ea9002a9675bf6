"""Render reports/<round>/data.html, a self-contained page with prepare's audit and statistics."""

from typing import Any

from stages.lib.core.html import render_page
from stages.lib.core.rows import TEXTS, HasPrompt
from stages.prepare.formats import source_texts

EXAMPLES_PER_CAUSE = 5
# Why rows of a cause were dropped, and what to do. Causes of the embedded data need no explanation.
EXPLANATIONS = {
    "bad row": "cannot be read as a demonstration or a pair; correct the row",
    "tie": "the pair names no better text, so a reward model can learn nothing from it",
    "another speaker": "a turn has a line that begins with a speaker's marker, e.g. `Human:`: two"
    " turns in one, or a dialogue as an answer (prepare.speaker_markers)",
    "contradiction": "another pair prefers the other one of the same two texts: one of the pairs"
    " must be wrong, so both are dropped",
    "exact duplicate": "equals an earlier row, ignoring case and white space",
    "near duplicate": "prompt and responses share most word 3-grams with an earlier row"
    " (prepare.near_duplicate)",
    "leak": "13 consecutive words, or nearly the whole text, occur in an evaluation text; dropped"
    " from the named training set",
    "prompt is held out": "its prompt equals or continues an evaluation prompt",
}


def render_report(report: dict[str, Any], round_: str) -> str:
    """The HTML page of a report, which is the content of data.json."""
    filters = {
        "texts": named_texts,
        "percent": lambda share: f"{share:.1%}",
        "number": lambda value: f"{value:,.6g}",
    }
    return render_page(
        "stages.prepare",
        "data.html.jinja",
        filters,
        report=report,
        round=round_,
        shown=EXAMPLES_PER_CAUSE,
        explanations=EXPLANATIONS,
    )


def named_texts(row: HasPrompt) -> list[tuple[str, str]]:
    """The row's texts as (name, text); a conversation becomes a transcript."""
    names = [name for name in TEXTS if name in row]
    return list(zip(names, source_texts(row), strict=True))
