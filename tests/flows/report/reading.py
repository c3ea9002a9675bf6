"""A page as a browser reads it."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """What a browser would fetch, the text that a reader sees, where links lead, and whether every
    tag is closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.pictures: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.fetched += [str(given[name]) for name in ("src", "data", "poster") if name in given]
        self.fetched += [str(given["href"])] if tag == "link" else []
        self.links += [str(given["href"])] if tag == "a" else []
        self.pictures += [str(given["aria-label"])] if tag == "svg" else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Closed already."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.words.append(text.strip())
