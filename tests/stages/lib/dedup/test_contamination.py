"""Leaks in hand-written texts."""

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.types import Prompt, Row
from stages.lib.dedup import contamination
from stages.lib.dedup.contamination import Leak, check_no_leaks, leaks_by_set
from stages.lib.dedup.shingles import batches

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards quietly brew tea in a tower"
RUN = " ".join(TEXT.split()[2:15])  # 13 words


def row(name: str, prompt: Prompt, completion: str) -> Row:
    return {"id": name, "prompt": prompt, "completion": completion}


def leaks_in(train: Row, *held_out: Row, similarity: float = 0.9) -> list[tuple[str, str]]:
    sets = {"train": [row("other", "Hello", " there"), train]}
    leaks = leaks_by_set(sets, held_out, similarity)["train"]
    return [(leak.held_out["id"], leak.shared) for leak in leaks]


def test_thirteen_words_in_a_row_leak_and_twelve_do_not() -> None:
    held_out = row("e", "Tell me a tale.", f" {TEXT}")
    assert leaks_in(row("t", "Write.", f" Once, {RUN.upper()}!"), held_out) == [("e", RUN)]
    assert leaks_in(row("t", "Write.", f" Once, {RUN.replace(' ', ' -- ')}!"), held_out) == [
        ("e", RUN)
    ]  # symbols aside
    twelve = " ".join(RUN.split()[:12])
    assert leaks_in(row("t", "Write.", f" Once, {twelve} and more"), held_out) == []


def test_a_run_may_begin_in_the_prompt_and_the_other_text_may_be_a_prompt() -> None:
    words = TEXT.split()
    held_out = {"id": "p", "prompt": " ".join(words)}
    assert leaks_in(row("t", " ".join(words[:10]), " " + " ".join(words[10:])), held_out) == [
        ("p", " ".join(words[:13]))
    ]
    pair = {"id": "t", "prompt": "Go on:", "chosen": " Well.", "rejected": f" {TEXT}"}
    assert leaks_in(pair, held_out) == [("p", " ".join(words[:13]))]


def test_a_run_may_have_a_single_word_in_the_response() -> None:
    words = RUN.split()
    held_out = row("e", "Tell me a tale.", f" {TEXT}")
    assert leaks_in(row("t", " ".join(words[:12]), f" {words[12]}!"), held_out) == [("e", RUN)]


def test_a_long_response_leaks_under_another_prompt() -> None:
    """30 words, each tenth changed: 21 of 28 3-grams stay (21 of 35 in both), but no run."""
    words = [f"w{i}" for i in range(30)]
    other = " ".join(f"x{i}" if i % 10 == 9 else word for i, word in enumerate(words))
    held_out = row("e", "Q", " " + " ".join(words))
    prompt = " ".join(f"p{i}" for i in range(40))
    assert leaks_in(row("t", prompt, f" {other}"), held_out, similarity=0.5) != []
    assert leaks_in(row("t", prompt, f" {other}"), held_out, similarity=0.6) == []


def test_equal_words_leak_at_any_similarity() -> None:
    """No similarity is above 1. The held-out prompt is too short for a run."""
    held_out = {"id": "p", "prompt": "Is it late?"}
    assert leaks_in(row("t", "Is it", " late?"), held_out, similarity=1.0) == [
        ("p", "is it late ?")
    ]
    assert leaks_in(row("t", "Is it", " early?"), held_out, similarity=1.0) == []


def test_each_cjk_character_is_a_word() -> None:
    text = "今天天气很好我们一起去公园散步吧"  # 16 characters
    assert leaks_in(row("t", "Say:", text[1:15]), row("e", "Speak:", text)) == [
        ("e", " ".join(text[1:14]))
    ]
    assert leaks_in(row("t", "Say:", text[1:13]), row("e", "Speak:", text)) == []


def test_a_short_text_leaks_where_all_its_words_are_the_same() -> None:
    held_out = row("e", "Yay Dayquil!!", " Yay with bells on!!")
    assert leaks_in(row("t", "Yay", " Dayquil! Yay with bells on!"), held_out) == [
        ("e", "yay dayquil yay with bells on")
    ]
    assert leaks_in(row("t", "Yay", " Dayquil! Yay with bells"), held_out) == []
    assert leaks_in(row("t", "?", "!"), row("e", "?!", "!")) == []
    assert leaks_in(row("t", "?", "!!"), row("e", "?!", "!")) == [("e", "? ! !")]


def test_a_shared_prompt_or_a_short_answer_is_no_leak() -> None:
    held_out = [row("e1", "Is it raining?", " Yes."), {"id": "e2", "prompt": "Is it raining?"}]
    assert leaks_in(row("t", "Is it raining?", " No, the sun shines."), *held_out) == []
    assert leaks_in(row("t", "Is it late?", " Yes."), *held_out) == []


def test_a_run_in_more_than_ten_held_out_texts_is_boilerplate() -> None:
    def held_out(number: int) -> list[Row]:
        return [row(f"e{i}", f"Question {i}?", f" {RUN} answer number {i}") for i in range(number)]

    train = row("t", "Another question?", f" {RUN} something else")
    assert leaks_in(train, *held_out(10)) == [("e0", RUN)]
    assert leaks_in(train, *held_out(11)) == []


def test_a_system_prompt_that_all_rows_have_is_no_leak() -> None:
    system = " ".join(f"s{i}" for i in range(80))
    held_out = [row(f"e{i}", f"{system} held {i}", f" answer {i}") for i in range(11)]
    assert leaks_in(row("t", f"{system} train 1", " another"), *held_out) == []
    assert leaks_in(row("t", f"{system} held 3", " answer 3"), *held_out) != []


def test_near_duplicates_leak_without_a_run() -> None:
    """A word changed after every eight: 40 words, of 38 3-grams 26 stay; 26 of 50 is 0.52."""
    words = [f"w{i}" for i in range(40)]
    other = [f"x{i}" if i % 9 == 8 else word for i, word in enumerate(words)]
    assert (
        leaks_in(
            row("t", "Q", " " + " ".join(other)),
            row("e", "Q", " " + " ".join(words)),
            similarity=0.4,
        )
        != []
    )
    assert (
        leaks_in(
            row("t", "Q", " " + " ".join(other)),
            row("e", "Q", " " + " ".join(words)),
            similarity=0.6,
        )
        == []
    )


def test_the_roles_of_a_conversation_are_not_words() -> None:
    def prompt(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    twelve = " ".join(RUN.split()[:12])
    assert (
        leaks_in(row("t", prompt(twelve), "Yes, indeed."), row("e", prompt(twelve), "No, never."))
        == []
    )
    assert leaks_in(row("t", prompt(RUN), "Yes, indeed."), row("e", prompt(RUN), "No, never.")) == [
        ("e", RUN)
    ]


@pytest.mark.parametrize(("rows", "words"), [(1, 20), (3, 60), (20_000, 2_000_000)])
def test_leaks_do_not_depend_on_what_is_in_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, rows: int, words: int
) -> None:
    """Rows 0, 4 and 6 of one set and one of two others leak: by runs, and a near duplicate."""
    monkeypatch.setattr(contamination, "TRAIN_ROWS", rows)
    monkeypatch.setattr(batches, "__defaults__", (words,))

    def other(name: str) -> Row:
        return row(name, f"Say {name}.", "".join(f" {name}{i}" for i in range(20)))

    held = [f"v{i}" for i in range(40)]
    near = " ".join("x" if i % 9 == 8 else word for i, word in enumerate(held))
    train = [other(f"t{i}") for i in range(8)]
    for index in (0, 6):
        train[index] = row(f"t{index}", "Write.", f" Once, {RUN}.")
    train[4] = row("t4", "Go.", f" {near}")
    held_out = [*(other(f"h{i}") for i in range(5)), row("near", "Go.", " " + " ".join(held))]
    held_out += [*(other(f"g{i}") for i in range(5)), row("run", "Tell.", f" {TEXT}")]
    sets = {"many": train, "few": [other("f"), row("f1", "Write.", f" {RUN}")], "none": []}
    sets["last"] = [row("l0", "Write.", f" {RUN}")]
    leaks_of = leaks_by_set(sets, held_out, 0.4)
    assert {
        name: [(leak.row, leak.held_out["id"], leak.shared.split()[0]) for leak in leaks]
        for name, leaks in leaks_of.items()
    } == {
        "many": [(0, "run", "brown"), (4, "near", "go"), (6, "run", "brown")],
        "few": [(1, "run", "brown")],
        "none": [],
        "last": [(0, "run", "brown")],
    }
    assert leaks_by_set({}, held_out, 0.4) == {}


def test_the_refusal_names_each_row_once() -> None:
    held_out, train = (
        [row("e.jsonl:3", "Q", f" {TEXT}")],
        [row("t.jsonl:8", "R", f" {TEXT}"), {"id": "t.jsonl:8", "prompt": TEXT}],
    )
    leaks = leaks_by_set({"train": train}, held_out, 0.9)["train"]
    assert [leak.row for leak in leaks] == [0, 1]
    with pytest.raises(
        BadInput,
        match=r"(?s)1 training rows.*"
        r"training t\.jsonl:8 and held-out e\.jsonl:3: “the quick.*\nfix it",
    ):
        check_no_leaks([(train[leak.row]["id"], leak) for leak in leaks], "fix it")
    check_no_leaks([], "nothing")


@pytest.mark.parametrize(
    ("number", "also"),
    [
        (5, ""),
        (7, "\n  also t:5, t:6"),
        (100, "\n  also t:5, t:6, "),
        (101, ", t:99, ..."),
    ],
)
def test_the_refusal_lists_as_many_rows_as_one_can_read(number: int, also: str) -> None:
    """Five with their words, up to 100 by location."""
    leaks = [
        (f"t:{index}", Leak(index, {"id": f"e:{index}", "prompt": "Q"}, "the words"))
        for index in range(number)
    ]
    with pytest.raises(BadInput) as refused:
        check_no_leaks(leaks, "fix it")
    message = str(refused.value)
    assert message.startswith(f"{number} training rows have 13 words in a row")
    lines = [f"  training t:{index} and held-out e:{index}: “the words”" for index in range(5)]
    assert "\n".join(lines) + ("" if number == 5 else "\n  also ") in message
    assert f"{also}" in message and message.endswith("\nfix it")
    assert ("also" in message) == (number > 5) and ("..." in message) == (number > 100)
    assert message.count("\n") == (6 if number == 5 else 7)
