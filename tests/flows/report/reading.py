"""What tests of the report share: a page as a browser shows it, and rounds that have run."""

from html.parser import HTMLParser
from typing import Any

from flows.report.round_files import STAGES


def all_ran(*rounds: str) -> dict[str, dict[str, Any]]:
    """Entries of dvc.lock, without content: the files of all stages are their results."""
    return {f"{stage}@{name}": {} for name in rounds for stage in STAGES}


class Page(HTMLParser):
    """The addresses that a browser would load, the visible texts, the titles of pictures, the
    links, and the tags that are still open.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.open_tags: list[str] = []
        self.pictures: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.fetched += [str(values[name]) for name in ("src", "data", "poster") if name in values]
        self.fetched += [str(values["href"])] if tag == "link" else []
        self.links += [str(values["href"])] if tag == "a" else []
        self.pictures += [str(values["aria-label"])] if tag == "svg" else []
        if tag not in ("meta", "br", "input"):
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """It has no end tag."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, text: str) -> None:
        self.words.append(" ".join(text.split()))  # as a browser shows white space
