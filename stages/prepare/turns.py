"""Messages and transcripts in their usual forms, as messages with role and content."""

import re
from collections.abc import Mapping
from typing import Any

from stages.lib.core.reading import parse_json
from stages.lib.core.types import ROLES

Messages = list[dict[str, str]]
Turns = str | Messages  # a text, or messages with role and content


class Defect(Exception):
    """A reason why a row cannot be used."""


class Tie(Defect):
    """A pair in which neither text is better."""


class Alone(Defect):
    """A rated response, or one with a bad label, to whose prompt there is no other response."""


# Names of a speaker in OpenAI's messages, ShareGPT, OASST, ... (lower case)
SPEAKERS = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "chatbot", "bot", "model"), "assistant"),
    **dict.fromkeys(("bing", "bard", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
TWO_TURNS = (("human", "assistant"), ("input", "output"))  # keys of Firefly's and XTuner's items
WEIGHTS = ("weight", "train", "training", "loss")  # of a message: whether it is trained on
# Parts of a message that a text would lose
LOST = re.compile(
    "tool_calls?|function_call|reasoning(_content)?|thinking|thoughts?|(image|video|audio)s?"
)
SYSTEM, HISTORY = ("system", "system_prompt"), "history"
CONTEXT = (*SYSTEM, HISTORY)  # columns that come before the prompt
TURN = re.compile(r"\n\n(Human|Assistant):")
# Anthropic's transcripts begin with two line breaks, which some copies have lost
TRANSCRIPT = re.compile(r"\n\nHuman:|Human:(?=.*\n\nAssistant:)", re.DOTALL)
DEEPSPEED = re.compile(r"\s*Human:.*\sAssistant:\s*", re.DOTALL)
JSON_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|content|from|value)"')


def turns(value: Any, name: str) -> Messages:
    """Messages as {role, content}.

    Args:
        value: a message, or a list of them. A message is {role, content}, {from, value},
            {role, text}, or two turns in one ({human, assistant}, {input, output}); its content is
            a text, or a list of parts that are texts.
        name: of the column, for messages.

    Raises:
        Defect: it has something else, e.g. a tool's turn or an image; the reason names it.

    Example:
        >>> turns([{"from": "human", "value": "Hi"}], "conversations")
        [{'role': 'user', 'content': 'Hi'}]
    """
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise Defect(f"`{name}` is {type(value).__name__}; expected text or a list of messages")
    result: Messages = []
    for number, message in enumerate(messages, 1):
        where = f"message {number} of `{name}`"
        if not isinstance(message, dict):
            raise Defect(f"{where}: expected a role and a content, got {type(message).__name__}")
        is_last = number == len(messages)
        if is_last and not all(message[key] for key in WEIGHTS if message.get(key) is not None):
            raise Defect(f"{where} is marked as not to be trained on")
        added = _two_turns(message, where) or [_turn(message, where)]
        if any(not turn["content"].strip() for turn in (added[:-1] if is_last else added)):
            raise Defect(f"{where} is empty")
        result += added
    return result


def _two_turns(message: Mapping[str, Any], where: str) -> Messages:
    keys = next((keys for keys in TWO_TURNS if message.keys() >= {*keys}), ())
    named = [("system", "system")] if keys and message.get("system") else []
    named += zip(keys, ("user", "assistant"), strict=False)
    return [{"role": role, "content": _text(message[key], where)} for key, role in named]


def _turn(message: Mapping[str, Any], where: str) -> dict[str, str]:
    speaker = message.get("role", message.get("from"))
    role = SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    content = message.get("content", message.get("value", message.get("text")))
    if lost := [key for key in message if LOST.fullmatch(str(key)) and message[key]]:
        raise Defect(f"{where} has `{lost[0]}`, and only texts are supported")
    if role is None or not isinstance(content, str | list):
        keys = ", ".join(map(str, message))
        raise Defect(
            f"{where}: expected a role ({', '.join(ROLES)}) and a content that is text, and it has"
            f" the keys {keys:.80}, role {speaker!r:.40} and content of {type(content).__name__}"
        )
    return {"role": role, "content": _text(content, where)}


def _text(content: Any, where: str) -> str:
    """The text of a content; parts that are texts are joined as chat templates do."""
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Defect(f"{where}: expected a content that is text, and it has {kind!s:.40}")
    return "".join(part["text"] for part in content)


def parse(value: Any, name: str) -> Turns:
    """A source value as text, or as messages if it is messages or a transcript.

    Raises:
        Defect: it is neither.
    """
    if not isinstance(value, str):
        return turns(value, name)
    if TRANSCRIPT.match(value):
        return parse_transcript(value, name)
    if JSON_MESSAGES.match(value):
        try:
            messages = parse_json(value)
        except ValueError:
            return value
        return turns(messages, name)
    return value


def parse_dialogue(value: Any, name: str) -> Turns:
    """As `parse`; DeepSpeed-Chat's "Human: ... Assistant:" in one line is a transcript, too."""
    prompt = parse(value, name)
    if isinstance(prompt, str) and DEEPSPEED.fullmatch(prompt):
        return _named_turns(re.split(r"(?:^|\s)(Human|Assistant):", prompt.strip())[1:-2])
    return prompt


def parse_transcript(text: str, name: str) -> Messages:
    """Anthropic's form as messages; a last, empty "Assistant:" turn of a prompt is dropped."""
    messages = _named_turns(TURN.split(text if text.startswith("\n") else f"\n\n{text}")[1:])
    if name == "prompt" and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    for number, message in enumerate(messages[:-1], 1):
        if not message["content"]:
            raise Defect(f"turn {number} of `{name}` is empty")
    return messages


def _named_turns(parts: list[str]) -> Messages:
    """Turns of [speaker, text, speaker, text, ...]."""
    return [
        {"role": SPEAKERS[speaker.lower()], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def has_context(raw: Mapping[str, Any]) -> bool:
    """Whether a row has columns that come before its prompt."""
    return any(raw.get(name) for name in CONTEXT)


def with_context(raw: Mapping[str, Any], prompt: Turns) -> Messages:
    """A prompt as messages, after the system prompt and the earlier turns in further columns.

    Raises:
        Defect: these columns have another form.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    history = raw.get(HISTORY) or []
    if isinstance(history, list) and history and isinstance(history[0], list | tuple):
        if any(len(item) != 2 for item in history):
            raise Defect(f"`{HISTORY}`: expected pairs of a question and its answer")
        history = [{"human": question, "assistant": answer} for question, answer in history]
    earlier = turns(history, HISTORY)
    named = {name: raw[name] for name in SYSTEM if raw.get(name)}
    if strange := [name for name, text in named.items() if not isinstance(text, str)]:
        raise Defect(f"`{strange[0]}` is {type(named[strange[0]]).__name__}; expected text")
    system = [{"role": "system", "content": text} for text in named.values()]
    if system == messages[:1]:
        messages = messages[1:]
    return [*system, *earlier, *messages]
