"""What pages of many entries have in common (browse.html.jinja): what can be chosen and sorted."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flows.core.tables import format_number
from stages.lib.core.html import render_page
from stages.lib.data.prompts import plain_prompt

Labels = Mapping[str, tuple[str, Mapping[str, str]]]  # of filters by name, see `choices_of`


@dataclass(frozen=True)
class Choice:
    """A filter of the page. texts: of each value. counts: entries by value."""

    label: str
    texts: Mapping[str, str]
    counts: Mapping[str, int]


def choices_of(facts: Iterable[Mapping[str, str]], labels: Labels) -> dict[str, Choice]:
    """The filters with a value that some entry has.

    Args:
        facts: of each entry, values by the filter's name.
        labels: of each filter, and the text of each of its values; `{}`: the value itself.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in labels}
    for entry in facts:
        for name, value in entry.items():
            counts[name][value] += 1
    return {
        name: Choice(
            label, texts or dict(zip(counts[name], counts[name], strict=True)), counts[name]
        )
        for name, (label, texts) in labels.items()
        if counts[name]
    }


def render(template: str, **values: Any) -> str:
    filters = {"number": format_number, "prompt": plain_prompt}
    return render_page("flows.report", template, filters, **values)
