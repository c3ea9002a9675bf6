"""Check rows of TRL's forms, and bring their texts into the shape of the prompt format.

They have strings, messages or Anthropic's transcripts, and an explicit prompt or one with which
chosen and rejected begin. https://huggingface.co/docs/trl/dataset_formats
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NotRequired, final

from typing_extensions import TypedDict

from stages.lib.core.params.data import SpeakerMarkers
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.rows import Columns, HasPrompt, PairTexts, responses_of
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import as_text, transcript
from stages.lib.metrics.text import words
from stages.prepare.turns import Defect, Messages, Tie, Turns, parse, parse_dialogue

# Of Anthropic's transcripts, ChatML, Llama 2 and 3, Alpaca, Gemma, Zephyr and Nemotron. Within a
# text they mean that the next turn was not cut off, or that a template was applied twice.
ROLE_MARKERS = (
    *("\n\nHuman:", "\n\nAssistant:", "<|im_start|>", "<|im_end|>"),
    *("[INST]", "[/INST]", "### Instruction:", "### Response:", "<|start_header_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<extra_id_1>"),
)
# At the start of a line: the turn of another speaker ("Assistant: Human: And you?"), frequent in
# public preference data. A prompt that is one text may contain them: it is formatted by its author.
# Two spaces or a quotation mark before it are left of a line break that was lost.
LOST_BREAK = r"(?:^[ \t]*|[ \t]{2,}|[\"\u201c])(?:Human|Assistant)[ \t]*:"
SPEAKER_MARKER = re.compile(rf"^[ \t]*(?:User|System|AI|Bot)[ \t]*:|{LOST_BREAK}", re.MULTILINE)
# A turn of the user may contain another dialogue as its material ("Customer: ... AI: ..."). There,
# only the names of Anthropic's transcripts show that the next turn was not cut off.
TRANSCRIPT_MARKER = re.compile(LOST_BREAK, re.MULTILINE)
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
# A transcript in one text, without the blank lines by which Anthropic's is recognised
DIALOGUE = re.compile(r"\s*(Human|User)\s*:.*\b(Assistant|AI|Bot)\s*:", re.DOTALL)
# Columns that belong to what a model is shown
LOST_COLUMNS = re.compile(
    r"system(_?(prompt|message))?|history|tools|functions|context|choices|options|passages?"
    r"|documents?|(image|video|audio)s?",
    re.IGNORECASE,
)
# Columns that say where a row is from, so that their text is no prompt
ORIGIN = re.compile(
    r"(^|[^a-z])(id|idx|index|hash|source|origin|dataset|subset|split|category|topic|domain|tags?"
    r"|type|lang|language|model|annotator|worker|date|time|timestamp|url|license|version)$"
    r"|chosen|rejected",
    re.IGNORECASE,
)
MIN_REPEATED_WORDS = 4  # a response may begin with a shorter prompt by chance
EXCERPT_CHARACTERS = 200
SAME = "chosen and rejected are the same"


class Located(TypedDict):
    where: str  # `file:line`


class NormalisedRow(Located, HasPrompt):
    source: str  # the path of its file, or the hub id
    use: str  # `train` or `eval`
    columns: NotRequired[Columns]


@final
class SourceDemonstration(NormalisedRow):
    completion: str


@final
class SourcePair(NormalisedRow, PairTexts):
    margin: NotRequired[float]


@final
class SourcePrompt(NormalisedRow):
    pass


SourceRow = SourceDemonstration | SourcePair | SourcePrompt


class AnotherSpeaker(Defect):
    """A turn that contains the marker of another speaker's turn."""


def normalise(
    row: Row,
    prompt_format: PromptFormat,
    special_tokens: frozenset[str] = frozenset(),
    speaker_markers: SpeakerMarkers = SpeakerMarkers.drop,
    ignored: Mapping[str, Any] = {},
) -> Row:
    """Check a row, and bring its texts into the shape of the prompt format.

    Args:
        row: of `formats.trl_rows`.
        prompt_format: decides the shape of the texts (see `shape`).
        special_tokens: of the tokenizer; no text may contain one.
        speaker_markers: whether a turn may contain the marker of another speaker.
        ignored: the columns of the source row that are not read.

    Returns:
        {prompt, completion}, {prompt, chosen, rejected} or {prompt}, with `margin` or `rating` if
        the row has one.

    Raises:
        Defect: the row cannot be used; the message is the reason. Tie: neither text is better.
            AnotherSpeaker: with `drop`, a turn contains the marker of another speaker.

    Example:
        >>> normalise({"chosen": "It is blue", "rejected": "It is red"}, PromptFormat.plain)
        {'prompt': 'It is', 'chosen': ' blue', 'rejected': ' red'}
    """
    parsed = parse_dialogue if prompt_format is PromptFormat.chat else parse
    explicit_prompt = parsed(row["prompt"], "prompt") if row.get("prompt") is not None else None
    names = tuple(name for name in ("chosen", "rejected", "completion") if name in row)
    values = [parse(row[name], name) for name in names]
    check_columns(ignored, explicit_prompt, values)
    prompt, responses = split_prompt(explicit_prompt, values, names)
    check_prompt(prompt)
    check_dialogue(prompt, responses, explicit_prompt is None, prompt_format)
    for name, response in zip(names, responses, strict=True):
        if not response.strip():
            raise Defect(f"`{name}` is empty")
        check_text(response, f"`{name}`")
    all_text = " ".join([as_text(prompt), *responses])
    for token in special_tokens:
        if token in all_text:
            raise Defect(f"contains the tokenizer's special token {token}")
    numbers = read_margin(row) if "chosen" in row else {}
    numbers |= {"rating": row["rating"]} if "rating" in row else {}
    if len({" ".join(response.split()) for response in responses}) < len(responses):
        raise Tie(SAME)
    if speaker_markers is SpeakerMarkers.drop:
        check_speakers(prompt, dict(zip(names, responses, strict=True)))
    prompt, *responses = shape(prompt, *responses, prompt_format=prompt_format)
    return {"prompt": prompt, **dict(zip(names, responses, strict=True)), **numbers}


def check_columns(ignored: Mapping[str, Any], prompt: Turns | None, values: list[Turns]) -> None:
    """Check that no ignored column has a part of the prompt.

    Args:
        ignored: the columns that are not read.
        prompt: the explicit prompt.
        values: chosen and rejected, or the completion.
    """
    if not ignored:
        return
    shown = " ".join(as_text(value) for value in (prompt or "", *values))
    lost = [
        name
        for name, value in ignored.items()
        if LOST_COLUMNS.fullmatch(name) and not (isinstance(value, str) and value.strip() in shown)
    ]
    if lost:
        raise Defect(
            f"{quoted(lost)} would not be shown to the model: write it into `prompt` (a system"
            " prompt and earlier turns as messages), or remove the column"
        )
    texts = [value.strip() for value in values if isinstance(value, str)]
    if prompt is None and len(texts) == len(values):
        candidates = [
            name
            for name, value in ignored.items()
            if has_text(value)
            and not ORIGIN.search(name)
            and not all(isinstance(value, str) and text.startswith(value.strip()) for text in texts)
        ]
        if candidates:
            raise Defect(
                f"no `prompt`, and {quoted(candidates)} may be the prompt: rename its column to"
                " `prompt`; remove other columns, or name them in prepare.columns"
            )


def has_text(value: Any) -> bool:
    """Whether the value of a column is text, or a list of texts or messages."""
    if isinstance(value, list):
        return any(isinstance(item, str | dict) for item in value)
    return isinstance(value, str) and bool(value.strip())


def quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def check_dialogue(
    prompt: Prompt, responses: Sequence[str], is_implicit: bool, prompt_format: PromptFormat
) -> None:
    """Check that a prompt that is one text is no transcript that is taken as one turn, and that no
    pair repeats the prompt.
    """
    is_one_turn = is_implicit or prompt_format is PromptFormat.chat
    if is_one_turn and isinstance(prompt, str) and DIALOGUE.match(prompt):
        raise Defect(
            "the prompt is a transcript in one text: begin each turn with a blank line and Human:"
            " or Assistant:, or write messages"
            + ("" if is_implicit else "; or set prepare.prompt_format: plain")
        )
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    repeats = all(response.strip().startswith(text.strip()) for response in responses)
    if repeats and len(responses) > 1 and len(list(words(text))) >= MIN_REPEATED_WORDS:
        raise Defect("chosen and rejected repeat the prompt: remove it there, or remove `prompt`")


def read_margin(raw: dict[str, Any]) -> dict[str, float]:
    """TRL's `margin`, by which chosen should score above rejected, as {margin}; {} if there is
    none.
    """
    margin = raw.get("margin")
    if margin is None:
        return {}
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin) or margin < 0:
        raise Defect(f"`margin` is {margin!r:.20}; expected a number of at least 0")
    if margin == 0:
        raise Tie("`margin` is 0")
    return {"margin": float(margin)}


def check_prompt(prompt: Prompt) -> None:
    """Check that a prompt is text, or turns of user and assistant that alternate and end with the
    user's, after at most one system turn.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise Defect("the prompt is empty")
        return check_characters(prompt, "the prompt")
    if not prompt:
        raise Defect("the prompt is empty")
    roles = [message["role"] for message in prompt]
    turns = roles[1:] if roles[0] == "system" else roles
    first_number = 1 + len(roles) - len(turns)
    for number, role in enumerate(turns, first_number):
        expected = ("user", "assistant")[(number - first_number) % 2]
        if role == "system":
            raise Defect(f"turn {number} of the prompt is the system's; it may only be the first")
        if role != expected:
            raise Defect(f"turn {number} of the prompt is the {role}'s; expected the {expected}'s")
    if len(turns) % 2 == 0:
        raise Defect(f"the prompt ends with the {roles[-1]}'s turn; expected the user's")
    for number, message in enumerate(prompt, 1):
        check_text(message["content"], f"turn {number} of the prompt")


def check_text(text: str, name: str) -> None:
    check_characters(text, name)
    for marker in ROLE_MARKERS:
        if marker in text:
            raise Defect(
                f"{name} contains the role marker {marker.strip()}: cut the text there, or split it"
                " into turns"
            )


def check_speakers(prompt: Prompt, responses: Mapping[str, str]) -> None:
    """Check that no turn of a conversation, and no response, contains another speaker's marker."""
    messages = [] if isinstance(prompt, str) else prompt
    turns = [
        (
            f"turn {number} of the prompt",
            message["content"],
            SPEAKER_MARKER if message["role"] == "assistant" else TRANSCRIPT_MARKER,
        )
        for number, message in enumerate(messages, 1)
    ]
    turns += [(f"`{name}`", response, SPEAKER_MARKER) for name, response in responses.items()]
    for name, text, marker in turns:
        if match := marker.search(text):
            marker_text = match[0].strip(' \t"\u201c')
            raise AnotherSpeaker(f"another speaker: {name} contains a turn of {marker_text}")


def check_characters(text: str, name: str) -> None:
    """Check that a text can be encoded and written."""
    if match := NOT_TEXT.search(text):
        character = match[0]
        if character == "\0":
            raise Defect(f"{name} contains a NUL character")
        raise Defect(f"{name} contains half of a surrogate pair, U+{ord(character):X}")


def shape(prompt: Prompt, *responses: str, prompt_format: PromptFormat) -> list[Any]:
    """Shape texts for a prompt format.

    Returns:
        [prompt, *responses]. chat: a list of messages, and the assistant's texts without
        surrounding white space. plain: a text, and the texts that continue it; messages become a
        transcript.
    """
    if prompt_format is PromptFormat.chat:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [messages, *(response.strip() for response in responses)]
    if isinstance(prompt, str):
        return [prompt, *responses]
    return [transcript(prompt), *(" " + response.strip() for response in responses)]


def split_prompt(
    prompt: Turns | None, values: list[Turns], names: tuple[str, ...]
) -> tuple[Prompt, list[str]]:
    """Separate the prompt from the responses, whether the `values` repeat the prompt or not."""
    if prompt is not None and not values:
        return prompt, []
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) == len(values):
        return (prompt, texts) if prompt is not None else common_text(*texts)
    conversations = [value for value in values if not isinstance(value, str)]
    if len(conversations) < len(values):
        raise Defect("chosen is text and rejected is messages, or the reverse")
    for name, conversation in zip(names, conversations, strict=True):
        if not conversation or conversation[-1]["role"] != "assistant":
            raise Defect(f"`{name}` does not end with an assistant turn")
    repeats_prompt = [len(conversation) > 1 for conversation in conversations]
    if all(repeats_prompt):  # as in UltraFeedback
        repeated = conversations[0][:-1]
        if any(conversation[:-1] != repeated for conversation in conversations):
            raise Defect("chosen and rejected differ before the last assistant turn")
        prompt = longer_prompt(prompt, repeated)
    elif any(repeats_prompt):
        raise Defect("one of chosen and rejected has several turns, the other only one")
    if prompt is None:
        raise Defect("no prompt, and the responses do not begin with one")
    return prompt, [conversation[-1]["content"] for conversation in conversations]


def longer_prompt(prompt: Turns | None, repeated: Messages) -> Messages:
    """The explicit prompt, or what the responses begin with: the one that contains the other."""
    if isinstance(prompt, list) and prompt[-len(repeated) :] == repeated:
        return prompt
    explicit, whole = (" ".join(as_text(value).split()) for value in (prompt or "", repeated))
    if explicit not in whole:
        raise Defect("`prompt` differs from the turns with which the responses begin")
    return repeated


def common_text(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """Split two texts after the words that both begin with: (prompt, [chosen, rejected]).

    The white space after the prompt belongs to the responses.
    """
    if chosen == rejected:
        raise Tie(SAME)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))])
    ends = [{word.end() for word in words(text)} for text in (chosen, rejected)]
    end = max((end for end in ends[0] & ends[1] if end <= shared), default=0)
    return chosen[:end], [chosen[end:].rstrip(), rejected[end:].rstrip()]


def source_texts(row: HasPrompt) -> Iterator[str]:
    """The texts of a row: prompt, then responses."""
    yield as_text(row["prompt"])
    yield from responses_of(row)


def excerpt(text: str, max_length: int = EXCERPT_CHARACTERS) -> str:
    """The first `max_length` characters of a text in one line; invalid Unicode is replaced."""
    line = " ".join(text[: 4 * max_length].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def row_excerpt(row: HasPrompt) -> str:
    """The beginnings of a normalised row's texts in one line."""
    texts = list(source_texts(row))
    return " | ".join(excerpt(text, EXCERPT_CHARACTERS // len(texts) - 3) for text in texts)
