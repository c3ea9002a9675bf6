"""Every format and every defect, on rows written by hand."""

from typing import Any

import pytest

from stages.params import PromptFormat
from stages.prepare.formats import Defect, normalise

PLAIN, CHAT = PromptFormat.plain, PromptFormat.chat


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SKY = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
TALK = [user("Sky?"), assistant("Up."), user("Colour?")]
TALK_TEXT = "\n\nHuman: Sky?\n\nAssistant: Up.\n\nHuman: Colour?\n\nAssistant:"
TALK_PLAIN = {"prompt": TALK_TEXT, "chosen": " Blue.", "rejected": " Green."}
TALK_CHAT = {"prompt": TALK, "chosen": "Blue.", "rejected": "Green."}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param({**SKY, "id": 7, "margin": 1.5}, SKY, id="standard, explicit prompt"),
        pytest.param({"chosen": "The sky is blue.", "rejected": "The sky is green."}, SKY, id="standard, implicit prompt"),
        pytest.param(
            {"chosen": "The sky is black", "rejected": "The sky is blue"},
            {"prompt": "The sky is", "chosen": " black", "rejected": " blue"},
            id="the implicit prompt ends with a word",
        ),
        pytest.param({"prompt": "The sky is", "completion": " blue."}, {"prompt": "The sky is", "completion": " blue."}, id="completion"),
        pytest.param({"prompt": TALK, "chosen": [assistant("Blue.")], "rejected": [assistant("Green.")]}, TALK_PLAIN, id="conversational"),
        pytest.param({"chosen": [*TALK, assistant("Blue.")], "rejected": [*TALK, assistant("Green.")]}, TALK_PLAIN, id="implicit turns"),
        pytest.param(
            {"prompt": "Colour?", "chosen": [user("Colour?"), assistant("Blue.")], "rejected": [user("Colour?"), assistant("Green.")]},
            {"prompt": "\n\nHuman: Colour?\n\nAssistant:", "chosen": " Blue.", "rejected": " Green."},
            id="UltraFeedback: a prompt, and answers that repeat it",
        ),
        pytest.param({"prompt": TALK, "chosen": "Blue.", "rejected": "Green."}, TALK_PLAIN, id="messages, answers as text"),
        pytest.param({"chosen": TALK_TEXT + " Blue.", "rejected": TALK_TEXT + " Green."}, TALK_PLAIN, id="Anthropic transcript"),
        pytest.param({"prompt": TALK_TEXT, "chosen": " Blue.", "rejected": " Green."}, TALK_PLAIN, id="Anthropic prompt"),
        pytest.param(
            {"prompt": TALK, "completion": [assistant("Blue.")]}, {"prompt": TALK_TEXT, "completion": " Blue."}, id="demonstration"
        ),
    ],
)
def test_formats_under_plain(raw: dict[str, Any], expected: dict[str, str]) -> None:
    assert normalise(raw, PLAIN) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(SKY, {"prompt": [user("The sky is")], "chosen": "blue.", "rejected": "green."}, id="standard"),
        pytest.param({"prompt": TALK, "chosen": [assistant("Blue.")], "rejected": [assistant("Green.")]}, TALK_CHAT, id="conversational"),
        pytest.param({"chosen": TALK_TEXT + " Blue.", "rejected": TALK_TEXT + " Green."}, TALK_CHAT, id="Anthropic transcript"),
    ],
)
def test_formats_under_chat(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    assert normalise(raw, CHAT) == expected


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (["chosen"], "not a JSON object"),
        ({"text": "x"}, "expected the keys"),
        ({"prompt": "x", "chosen": "y"}, "expected the keys"),
        ({**SKY, "chosen": 3}, "`chosen` is int; expected text or a list of messages"),
        ({**SKY, "prompt": {"a": 1}}, "`prompt` is dict"),
        ({**SKY, "rejected": "  "}, "`rejected` is empty"),
        ({**SKY, "prompt": " \n"}, "the prompt is empty"),
        ({**SKY, "prompt": []}, "the prompt is empty"),
        ({**SKY, "rejected": "  blue. "}, "chosen and rejected are the same"),
        ({"chosen": "The sky", "rejected": "The sky"}, "chosen and rejected are the same"),
        ({"chosen": "The sky", "rejected": "The sky above"}, "`chosen` is empty"),
        ({"chosen": "Blue sky", "rejected": "Green grass"}, "the prompt is empty"),
        ({"prompt": TALK, "chosen": [user("x")], "rejected": [assistant("y")]}, "`chosen` does not end with an assistant turn"),
        ({"prompt": TALK, "chosen": [assistant("x")], "rejected": []}, "`rejected` does not end with an assistant turn"),
        ({"prompt": TALK, "completion": [assistant("")]}, "`completion` is empty"),
        ({"prompt": TALK, "chosen": [assistant("x")], "rejected": "y"}, "chosen is text and rejected is messages"),
        ({"chosen": [assistant("x")], "rejected": [assistant("y")]}, "no prompt"),
        ({"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]}, "differ before the last assistant turn"),
        ({"chosen": [user("a"), assistant("x")], "rejected": [assistant("y")]}, "one has several turns"),
        ({"prompt": [{"role": "tool", "content": "x"}], "completion": "y"}, "message 1 of `prompt`: expected a role"),
        ({"prompt": [user("x"), {"role": "user"}], "completion": "y"}, "message 2 of `prompt`: expected a role"),
        ({"prompt": [user(" "), assistant("x"), user("y")], "completion": "z"}, "message 1 of `prompt` is empty"),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c", "rejected": "\n\nHuman: a\n\nAssistant: d"},
            "`chosen` does not end with an",
        ),
        ({"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: d"}, "`chosen` is empty"),
        ({"chosen": "\n\nHuman:\n\nAssistant: b", "rejected": "\n\nHuman:\n\nAssistant: d"}, "turn 1 of `chosen` is empty"),
        ({**SKY, "chosen": " blue<eos>"}, "special token <eos>"),
        ({"prompt": [user("a <eos>")], "completion": "b"}, "special token <eos>"),
    ],
)
def test_defects(raw: Any, reason: str) -> None:
    with pytest.raises(Defect, match=reason):
        normalise(raw, PLAIN, frozenset({"<eos>"}))
