"""Formats and defects of rows written by hand."""

from typing import Any

import pytest

from stages.lib.core.params.data import SpeakerMarkers
from stages.lib.core.params.shared import PromptFormat
from stages.prepare.normalise import AnotherSpeaker, excerpt, row_excerpt
from stages.prepare.turns import Defect, Tie
from tests.stages.prepare.rows import becomes

PLAIN, CHAT = PromptFormat.plain, PromptFormat.chat


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


SKY = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
TALK = [user("Sky?"), assistant("Up."), user("Colour?")]
TALK_TEXT = "\n\nHuman: Sky?\n\nAssistant: Up.\n\nHuman: Colour?\n\nAssistant:"
TALK_PLAIN = {"prompt": TALK_TEXT, "chosen": " Blue.", "rejected": " Green."}
TALK_CHAT = {"prompt": TALK, "chosen": "Blue.", "rejected": "Green."}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param({**SKY, "id": 7}, SKY, id="standard, explicit prompt"),
        pytest.param({**SKY, "margin": 2}, {**SKY, "margin": 2.0}, id="a margin"),
        pytest.param({**SKY, "margin": None}, SKY, id="an empty margin, as Parquet has it"),
        pytest.param(
            {"prompt": "a", "completion": "b", "margin": -1},
            {"prompt": "a", "completion": "b"},
            id="no pair, no margin",
        ),
        pytest.param(
            {"chosen": "The sky is blue.", "rejected": "The sky is green."},
            SKY,
            id="standard, implicit prompt",
        ),
        pytest.param(
            {"chosen": "The sky is black", "rejected": "The sky is blue"},
            {"prompt": "The sky is", "chosen": " black", "rejected": " blue"},
            id="the implicit prompt ends with a word",
        ),
        pytest.param(
            {"chosen": "天空是蓝的。", "rejected": "天空是绿的。"},
            {"prompt": "天空是", "chosen": "蓝的。", "rejected": "绿的。"},
            id="the implicit prompt of a language without spaces",
        ),
        pytest.param(
            {"prompt": "The sky is", "completion": " blue."},
            {"prompt": "The sky is", "completion": " blue."},
            id="completion",
        ),
        pytest.param(
            {"prompt": TALK, "chosen": [assistant("Blue.")], "rejected": [assistant("Green.")]},
            TALK_PLAIN,
            id="conversational",
        ),
        pytest.param(
            {"chosen": [*TALK, assistant("Blue.")], "rejected": [*TALK, assistant("Green.")]},
            TALK_PLAIN,
            id="implicit turns",
        ),
        pytest.param(
            {
                "prompt": "Colour?",
                "chosen": [user("Colour?"), assistant("Blue.")],
                "rejected": [user("Colour?"), assistant("Green.")],
            },
            {
                "prompt": "\n\nHuman: Colour?\n\nAssistant:",
                "chosen": " Blue.",
                "rejected": " Green.",
            },
            id="UltraFeedback: a prompt, and responses that repeat it",
        ),
        pytest.param(
            {"prompt": TALK, "chosen": "Blue.", "rejected": "Green."},
            TALK_PLAIN,
            id="messages, responses as text",
        ),
        pytest.param(
            {"chosen": TALK_TEXT + " Blue.", "rejected": TALK_TEXT + " Green."},
            TALK_PLAIN,
            id="Anthropic transcript",
        ),
        pytest.param(
            {"prompt": TALK_TEXT, "chosen": " Blue.", "rejected": " Green."},
            TALK_PLAIN,
            id="Anthropic prompt",
        ),
        pytest.param(
            {"prompt": TALK, "completion": [assistant("Blue.")]},
            {"prompt": TALK_TEXT, "completion": " Blue."},
            id="demonstration",
        ),
    ],
)
def test_formats_under_plain(raw: dict[str, Any], expected: dict[str, str]) -> None:
    assert becomes(raw, PLAIN) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            SKY,
            {"prompt": [user("The sky is")], "chosen": "blue.", "rejected": "green."},
            id="standard",
        ),
        pytest.param(
            {"prompt": TALK, "chosen": [assistant("Blue.")], "rejected": [assistant("Green.")]},
            TALK_CHAT,
            id="conversational",
        ),
        pytest.param(
            {"chosen": TALK_TEXT + " Blue.", "rejected": TALK_TEXT + " Green."},
            TALK_CHAT,
            id="Anthropic transcript",
        ),
    ],
)
def test_formats_under_chat(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    assert becomes(raw, CHAT) == expected


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (["chosen"], "not a JSON object"),
        ({"text": "x"}, "no border between prompt and response"),
        ({"prompt": "x", "chosen": "y"}, "unknown form, .* without `rejected`"),
        ({**SKY, "chosen": 3}, "`chosen` is int; expected text or a list of messages"),
        ({**SKY, "prompt": 7}, "`prompt` is int; expected text or a list"),
        ({**SKY, "rejected": "  "}, "`rejected` is empty"),
        ({**SKY, "prompt": " \n"}, "the prompt is empty"),
        ({**SKY, "prompt": []}, "the prompt is empty"),
        ({**SKY, "rejected": "  blue. "}, "chosen and rejected are the same"),
        ({"chosen": "The sky", "rejected": "The sky"}, "chosen and rejected are the same"),
        ({"chosen": "The sky", "rejected": "The sky above"}, "`chosen` is empty"),
        ({"chosen": "Blue sky", "rejected": "Green grass"}, "the prompt is empty"),
        (
            {"prompt": TALK, "chosen": [user("x")], "rejected": [assistant("y")]},
            "`chosen` does not end with an assistant turn",
        ),
        (
            {"prompt": TALK, "chosen": [assistant("x")], "rejected": []},
            "`rejected` does not end with an assistant turn",
        ),
        ({"prompt": TALK, "completion": [assistant("")]}, "`completion` is empty"),
        (
            {"prompt": TALK, "chosen": [assistant("x")], "rejected": "y"},
            "chosen is text and rejected is messages",
        ),
        ({"chosen": [assistant("x")], "rejected": [assistant("y")]}, "no prompt"),
        (
            {"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]},
            "differ before the last assistant turn",
        ),
        (
            {"chosen": [user("a"), assistant("x")], "rejected": [assistant("y")]},
            "one of chosen and rejected has several turns",
        ),
        (
            {"prompt": [{"role": "tool", "content": "x"}], "completion": "y"},
            "message 1 of `prompt`: expected a role",
        ),
        (
            {"prompt": [user("x"), {"role": "user"}], "completion": "y"},
            "message 2 of `prompt`: expected a role",
        ),
        (
            {"prompt": [user(" "), assistant("x"), user("y")], "completion": "z"},
            "message 1 of `prompt` is empty",
        ),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c",
                "rejected": "\n\nHuman: a\n\nAssistant: d",
            },
            "`chosen` does not end with an",
        ),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: d"},
            "`chosen` is empty",
        ),
        (
            {"chosen": "\n\nHuman:\n\nAssistant: b", "rejected": "\n\nHuman:\n\nAssistant: d"},
            "turn 1 of `chosen` is empty",
        ),
        ({**SKY, "margin": -0.5}, "`margin` is -0.5; expected a number of at least 0"),
        ({**SKY, "margin": "2"}, "`margin` is '2'; expected a number"),
        ({**SKY, "margin": True}, "`margin` is True; expected a number"),
        ({**SKY, "margin": float("nan")}, "`margin` is nan; expected a number"),
        ({**SKY, "margin": 0}, "`margin` is 0"),
        ({**SKY, "chosen": " blue.\n\nHuman: And?"}, "`chosen` contains the role marker Human:"),
        (
            {**SKY, "rejected": " a\n\nAssistant: b"},
            "`rejected` contains the role marker Assistant:",
        ),
        (
            {**SKY, "rejected": "<|im_start|>user"},
            r"`rejected` contains the role marker <\|im_start\|>",
        ),
        ({**SKY, "chosen": "[INST] Go on"}, r"`chosen` contains the role marker \[INST\]"),
        (
            {"prompt": "a", "completion": "### Response: b"},
            "`completion` contains the role marker ### Response:",
        ),
        (
            {"prompt": [user("### Instruction: a")], "completion": "b"},
            "turn 1 of the prompt contains the role marker",
        ),
        (
            {"prompt": [user("a"), user("b")], "completion": "c"},
            "turn 2 of the prompt is the user's; expected the assistant's",
        ),
        (
            {"prompt": [assistant("a"), user("b")], "completion": "c"},
            "turn 1 of the prompt is the assistant's; expected the user's",
        ),
        (
            {"prompt": [user("a"), system("b"), user("c")], "completion": "d"},
            "turn 2 of the prompt is the system's; it may only be the",
        ),
        (
            {"prompt": [system("a"), assistant("b")], "completion": "c"},
            "turn 2 of the prompt is the assistant's; expected the user's",
        ),
        (
            {"prompt": [user("a"), assistant("b")], "completion": "c"},
            "the prompt ends with the assistant's turn",
        ),
        ({"prompt": [system("a")], "completion": "c"}, "the prompt ends with the system's turn"),
        (
            {
                "chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c",
                "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d",
            },
            "turn 2 of the prompt is the user's",
        ),
        ({**SKY, "chosen": " blue\x00"}, "`chosen` contains a NUL character"),
        (
            {**SKY, "prompt": "The \ud83d sky"},
            r"the prompt contains half of a surrogate pair, U\+D83D",
        ),
        ({**SKY, "chosen": " blue<eos>"}, "special token <eos>"),
        ({"prompt": [user("a <eos>")], "completion": "b"}, "special token <eos>"),
    ],
)
def test_defects(raw: Any, reason: str) -> None:
    with pytest.raises(Defect, match=reason):
        becomes(raw, PLAIN, frozenset({"<eos>"}))


ASKED = {"chosen": "Tea is a plant.", "rejected": "Tea is what I drink."}
LONG = {"prompt": "What is tea made of?", "chosen": "Leaves.", "rejected": "Water."}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({**ASKED, "title": "Explain tea."}, "no `prompt`, and `title` may be"),
        ({**ASKED, "title": "Tea?", "body": "A plant"}, "`title`, `body` may be"),
        ({**LONG, "choices": ["Leaves", "Water"]}, "`choices` would not be shown to the model"),
        ({**LONG, "images": [{"bytes": "x"}]}, "`images` would not"),
        ({"prompt": TALK, "completion": "Blue.", "tools": [{"name": "f"}]}, "`tools` would not"),
        (
            {
                **LONG,
                "chosen": "What is tea made of? Leaves.",
                "rejected": "What is tea made of? x",
            },
            "chosen and rejected repeat the prompt",
        ),
        (
            {
                "prompt": [system("Be brief."), user("Other?")],
                "chosen": [user("Sky?"), assistant("Blue.")],
                "rejected": [user("Sky?"), assistant("Red.")],
            },
            "`prompt` differs from the turns",
        ),
        (
            {"chosen": "Human: a Assistant: b c", "rejected": "Human: a Assistant: b d"},
            "the prompt is a transcript in one text",
        ),
    ],
)
def test_no_part_of_a_row_is_lost_without_a_word(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(Defect, match=reason) as caught:
        becomes(raw, PLAIN)
    assert not isinstance(caught.value, Tie)


@pytest.mark.parametrize(
    ("raw", "columns"),
    [
        ({**LONG, "answer": "leaves", "rating": 3, "messages": [user("a")]}, ()),
        ({**ASKED, "id": "x1", "source": "web", "prompt_id": "p", "chosen_model": "m"}, ()),
        ({**ASKED, "n": 3, "instruction": "", "tags": ["a"]}, ()),
        ({**ASKED, "title": "Tea is"}, ()),  # the responses begin with it
        ({**ASKED, "answer": "a plant"}, ("answer",)),
        ({"prompt": "2 + 2 =", "completion": "4", "label": 1}, ("label",)),
        ({"prompt": "2 + 2 =", "completion": "4", "label": "4"}, ()),
        ({**LONG, "system": "", "history": [], "tools": "[]"}, ()),
        (
            {"prompt": [system("Be brief."), user("a")], "completion": "b", "system": "Be brief."},
            (),
        ),
    ],
)
def test_columns_that_are_no_part_of_the_prompt(
    raw: dict[str, Any], columns: tuple[str, ...]
) -> None:
    assert becomes(raw, PLAIN, columns=columns)


def test_of_two_prompts_the_one_with_more_turns_is_read() -> None:
    """A system prompt may be only in `prompt`, or only in the responses."""
    short, whole = [user("Sky?")], [system("Be brief."), user("Sky?")]
    for explicit, repeated in ((whole, short), (short, whole)):
        raw = {
            "prompt": explicit,
            "chosen": [*repeated, assistant("Blue.")],
            "rejected": [*repeated, assistant("Red.")],
        }
        expected = {"prompt": whole, "chosen": "Blue.", "rejected": "Red."}
        assert becomes(raw, CHAT) == expected


def test_a_transcript_in_one_text_is_no_turn_of_a_user() -> None:
    raw = {"prompt": "User: Sky? AI:", "completion": " Blue."}
    with pytest.raises(Defect, match=r"transcript in one text.*prompt_format: plain"):
        becomes(raw, CHAT)
    assert becomes(raw, PLAIN) == raw


def test_deepspeed_chat_has_turns_in_one_line() -> None:
    """In the plain format the text is what the model sees."""
    raw = {"prompt": "Human: Sky? Assistant: Up. Human: Colour? Assistant:", "completion": " Blue."}
    assert becomes(raw, CHAT) == {"prompt": TALK, "completion": "Blue."}
    assert becomes(raw, PLAIN) == raw


SPEAKERS = [
    ({**SKY, "chosen": " Human: And you?"}, "`chosen` contains a turn of Human:"),
    ({**SKY, "rejected": " red.\nUser : Why?"}, "`rejected` contains a turn of User :"),
    ({"prompt": [user("a"), assistant("User: b"), user("c")], "completion": "d"}, "turn 2 of"),
    ({"prompt": [user("a\nAssistant: b")], "completion": "c"}, "turn 1 of .* of Assistant:"),
    (
        {
            "chosen": "\n\nHuman: a\n\nAssistant: Human: b",
            "rejected": "\n\nHuman: a\n\nAssistant: c",
        },
        "`chosen` contains a turn of Human:",
    ),
    ({**SKY, "chosen": " blue.  Human: Why?"}, "`chosen` contains a turn of Human:"),
    ({**SKY, "chosen": ' "Human: Why?"'}, "`chosen` contains a turn of Human:"),
]


@pytest.mark.parametrize(("raw", "reason"), SPEAKERS)
def test_turns_with_another_speaker_are_refused_or_kept(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(AnotherSpeaker, match=f"^another speaker: .*{reason}"):
        becomes(raw, PLAIN)
    assert becomes(raw, PLAIN, speaker_markers=SpeakerMarkers.keep)


def test_markers_inside_a_line_and_in_a_prompt_that_is_one_text_are_no_speakers() -> None:
    inside = {**SKY, "chosen": " as the User:  field says", "rejected": " A Human: all of them"}
    prompt = {"prompt": "User: Sky?\nAssistant:", "completion": " Blue."}
    for raw in (inside, prompt):
        assert becomes(raw, PLAIN) == raw


@pytest.mark.parametrize(
    "raw",
    [
        {**SKY, "margin": 0.0},
        {**SKY, "score_chosen": 8.0, "score_rejected": 8},
        {**SKY, "chosen-rating": 10**400, "rejected-rating": 10**400},
        {"chosen_score": 1.5, "rejected_score": 1.5, **SKY},
        {**SKY, "rejected": "blue.\n"},
        {"chosen": "The sky", "rejected": "The sky"},
    ],
)
def test_a_pair_without_a_better_text_is_a_tie(raw: dict[str, Any]) -> None:
    with pytest.raises(Tie):
        becomes(raw, PLAIN)


@pytest.mark.parametrize(
    "scores",
    [
        {"score_chosen": 8, "score_rejected": 6},
        {"score_chosen": 8, "score_rejected": 8, "reward_chosen": 1, "reward_rejected": 0},
        {"score_chosen": 8, "score_rejected": 8, "margin": 1},
        {"chosen_length": 3, "rejected_length": 3},
        {"score_chosen": None, "score_rejected": None},
    ],
)
def test_scores_that_are_no_tie(scores: dict[str, Any]) -> None:
    assert becomes({**SKY, **scores}, PLAIN)["chosen"] == " blue."


def test_a_user_may_quote_a_dialogue() -> None:
    """As in PandaLM's pairs: the dialogue is the material of the task."""
    quoted = user("Add an answer.\nCustomer: Hi.\nAI: Hello! Which one?\nSystem: Linux\nUser: root")
    raw = {"prompt": [quoted], "completion": "The blue one."}
    assert becomes(raw, CHAT) == raw


def test_what_a_prompt_may_contain() -> None:
    """A template filled in by the user, and a system turn."""
    alpaca = {"prompt": "### Instruction:\nSky?\n### Response:\n", "completion": "Blue."}
    assert becomes(alpaca, PLAIN) == alpaca
    raw = {"prompt": [system("Be brief."), *TALK], "completion": [assistant("Blue.")]}
    assert becomes(raw, CHAT) == {"prompt": raw["prompt"], "completion": "Blue."}


def test_an_excerpt_can_be_written() -> None:
    assert excerpt("a \n b\ud83d") == "a b?"
    assert excerpt("x" * 300) == "x" * 199 + "…"
    long = {"prompt": "p" * 300, "chosen": "c" * 300, "rejected": " no"}
    assert row_excerpt(long) == "p" * 62 + "… | " + "c" * 62 + "… | no"
