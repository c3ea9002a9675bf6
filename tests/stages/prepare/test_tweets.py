"""The rules of the embedded data, on texts written by hand."""

from pathlib import Path

import pytest

from stages.lib.core.params.shared import PromptFormat
from stages.prepare.audit import Audit
from stages.prepare.tweets import clean, openings, preference_pairs, read

PLAIN = PromptFormat.plain


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@anonymous :) ha ha, you are so funny.  today", ":) ha ha, you are so funny. today"),
        ("RT @anonymous: @other Tom &amp; Anna went home at noon", "Tom & Anna went home at noon"),
        ("Rain &lt;3 all day long here http://url_removed", "Rain <3 all day long here"),
        ("What a day it was here via @anonymous", "What a day it was here"),
        (".@anonymous this is quite a fine day", "this is quite a fine day"),
    ],
)
def test_links_and_handles_at_the_ends_are_cut(text: str, words: str) -> None:
    kept = clean([{"text": text, "where": "x"}], 4, Audit())
    assert [" ".join(row["words"]) for row in kept] == [words]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("I hung with @anonymous today and it was awesome", "link or handle within the text"),
        ("What a load of bullshit this whole day has been", "profanity"),
        ("DAMN it, we are late for the show", "profanity"),
        ("Five words are too few", "too short"),
        ("@anonymous Five words are too few", "too short"),
    ],
)
def test_dropped_texts_are_recorded_by_cause(text: str, cause: str) -> None:
    audit = Audit()
    assert clean([{"text": text, "where": "tweets.tsv:7"}], 4, audit) == []
    assert audit.dropped == {cause: [{"where": "tweets.tsv:7", "text": text}]}


@pytest.mark.parametrize(
    "text",
    ["Glass, grass and Dickens in my class", "Hello shell, my assistant passed the assessment"],
)
def test_harmless_words_are_not_profanity(text: str) -> None:
    assert len(clean([{"text": text, "where": "x"}], 4, Audit())) == 1


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tweets.tsv"
    path.write_text(
        "1\t2.5\tGood\n2\tgood\tx\n3\t1.0\n4\t4.5\tx\n5\t-4\t \n6\t-1.25\tBad\twith a tab"
    )
    audit = Audit()
    assert [(row["id"], row["rating"], row["text"]) for row in read(path, None, audit)] == [
        ("1", 2.5, "Good"),
        ("6", -1.25, "Bad\twith a tab"),
    ]
    assert [row["where"] for row in audit.dropped["bad row"]] == [
        "tweets.tsv:2",
        "tweets.tsv:3",
        "tweets.tsv:4",
        "tweets.tsv:5",
    ]
    assert audit.rows_read == {"tweets.tsv": 6}
    assert len(read(path, 1, Audit())) == 1


def text(name: str, rating: float, words: str) -> dict[str, object]:
    return {"id": name, "rating": rating, "words": words.split(), "where": name}


FIVE = [
    text("d", -1.0, "We lost it"),
    text("a", 3.0, "We won it"),
    text("e", -2.0, "we, sadly, wept"),
    text("b", 2.0, "We like it"),
    text("c", 0.0, "We saw it"),
    text("x", 3.0, "Alone here"),
]


def test_pairs_by_hand() -> None:
    """Sorted by rating: a 3, b 2, c 0, d -1, e -2; upper half a, b; lower half d, e. a is paired
    with d and e, b with e and d.
    """
    pairs = preference_pairs(FIVE, 0.8, 2, PLAIN)
    assert [row["id"] for row in pairs] == ["tweet-a-d", "tweet-a-e", "tweet-b-d", "tweet-b-e"]
    assert pairs[1] == {
        "id": "tweet-a-e",
        "prompt": "We",
        "chosen": " won it",
        "rejected": " sadly, wept",
        "source": "tweets",
    }
    assert [row["id"] for row in preference_pairs(FIVE, 0.8, 1, PLAIN)] == [
        "tweet-a-d",
        "tweet-b-e",
    ]
    assert [row["id"] for row in preference_pairs(FIVE, 3.5, 2, PLAIN)] == [
        "tweet-a-d",
        "tweet-a-e",
        "tweet-b-e",
    ]
    assert len(preference_pairs(FIVE, 0.8, 5, PLAIN)) == 4  # no pair twice


def test_openings_are_distinct() -> None:
    texts = [
        text("a", 0, "We saw it there"),
        text("b", 0, "we SAW him"),
        text("c", 0, "They saw it"),
    ]
    assert openings(texts, 2, PLAIN) == [
        {"id": "tweet-a", "prompt": "We saw", "source": "tweets"},
        {"id": "tweet-c", "prompt": "They saw", "source": "tweets"},
    ]
