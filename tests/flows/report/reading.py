"""What tests of the report share: a page as a browser shows it, and rounds that have run."""

from html.parser import HTMLParser
from typing import Any

from flows.report.round_files import STAGES


def all_ran(*rounds: str) -> dict[str, dict[str, Any]]:
    """Entries of dvc.lock, without content: the files of all stages are their results."""
    return {f"{stage}@{name}": {} for name in rounds for stage in STAGES}


class Page(HTMLParser):
    """The addresses that a browser would load, the visible texts, the titles of pictures, their
    Vega-Lite specifications as one text, the links, and the tags that are still open.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.open_tags: list[str] = []
        self.pictures: list[str] = []
        self.chart_data = ""
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.fetched += [str(values[name]) for name in ("src", "data", "poster") if name in values]
        self.fetched += [str(values["href"])] if tag == "link" else []
        self.links += [str(values["href"])] if tag == "a" else []
        if tag not in ("meta", "br", "input"):
            self.open_tags.append("json" if values.get("type") == "application/json" else tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """It has no end tag."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() in (tag, "json")

    def handle_data(self, text: str) -> None:
        if self.open_tags[-1:] == ["json"]:
            self.chart_data += text
        elif self.open_tags[-1:] != ["script"]:
            self.words.append(" ".join(text.split()))  # as a browser shows white space
        if self.open_tags[-2:] == ["figcaption", "b"]:
            self.pictures.append(self.words[-1])
