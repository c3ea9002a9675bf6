"""The data report page of a report written by hand."""

from html.parser import HTMLParser
from typing import Any

from stages.prepare.audit import render_report

LENGTHS = {
    unit: {"p5": 1.0, "p50": 2.5, "p95": 9.0, "max": 12, "mean": 3.1}
    for unit in ("words", "characters")
}
EVIL = "<script>alert(1)</script>"


def report(**changed: Any) -> dict[str, Any]:
    rules = [
        {
            "rule": "longest wins",
            "train": 0.7,
            "held_out": 0.71,
            "pays": True,
            "meaning": "longest wins 0.71: lengths alone predict the label",
        },
        {
            "rule": "TF-IDF",
            "train": None,
            "held_out": 0.5,
            "pays": False,
            "meaning": "TF-IDF 0.50: words alone predict little",
        },
    ]
    return {
        "rows_read": {"mine.jsonl": 1234},
        "rows_kept": 1200,
        "by_cause": {"bad row": 7, "leak": 1},
        "dropped": {
            "bad row": [
                {"where": f"mine.jsonl:{i}", "reason": "`chosen` is empty", "text": EVIL}
                for i in range(7)
            ],
            "leak": [
                {
                    "where": "mine.jsonl:9",
                    "of": "mine.jsonl:8",
                    "set": "pairs_train",
                    "shared": "once upon a time",
                }
            ],
        },
        "replayed": {"pairs": 2, "sft": 1},
        "sets": {
            "pairs_train": {"rows": 900, "distinct_prompts": 850, "lengths": {"chosen": LENGTHS}}
        },
        "languages": {"sampled": 10, "shares": {"en": 0.9, "de": 0.1}},
        "shortcuts": {
            "train_pairs": 900,
            "held_out_pairs": 200,
            "rules": rules,
            "words": {"chosen": ["good"], "rejected": ["bad"]},
        },
        "examples": {
            "pairs_train": [
                {
                    "id": "mine.jsonl:1",
                    "prompt": [{"role": "user", "content": EVIL}],
                    "chosen": "a",
                    "rejected": "b",
                    "margin": 2,
                }
            ]
        },
        **changed,
    }


class Reader(HTMLParser):
    """Collects the text, the tags, and the addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.text += " "
        self.fetched += [
            str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_reports_all_and_is_self_contained() -> None:
    html, reader = render_report(report(), "r1"), Reader()
    reader.feed(html)
    text = " ".join(reader.text.split())
    for expected in (
        "Data of round r1",
        "1,234 rows read",
        "1,200 kept",
        "7 dropped",
        "1 leaks dropped from training",
        "3 replayed from the previous round",
        "mine.jsonl:4: `chosen` is empty",
        "and 2 more, in data.json under lost",
        "mine.jsonl:9 because of mine.jsonl:8 in pairs_train shared: “once upon a time”",
        "longest wins 0.700 0.710 longest wins 0.71: lengths alone predict the label",
        "Words that best predict a chosen text: good.",
        "en 90.0%",
        "margin 2",
    ):
        assert expected in text, expected
    assert reader.fetched == [] and not reader.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in html and "@import" not in html and "//" not in html.replace("<!--", "")
    assert "prefers-color-scheme: dark" in html and "@media print" in html


def test_texts_are_escaped() -> None:
    html = render_report(report(), "r0")
    # in five of the bad rows, and in one example
    assert EVIL not in html and html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 5 + 1


def test_a_report_without_dropped_rows() -> None:
    reader = Reader()
    reader.feed(render_report(report(dropped={}, by_cause={}), "r0"))
    assert "Dropped rows, by cause None." in " ".join(reader.text.split())
