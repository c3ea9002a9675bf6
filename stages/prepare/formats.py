"""Normalise the users' formats to prompt + completion, or prompt + chosen + rejected.

Accepted: TRL's standard (strings) and conversational ({role, content} messages) forms, with an
explicit prompt or with one that chosen and rejected share; and Anthropic's transcripts
"\\n\\nHuman: ...\\n\\nAssistant: ...". https://huggingface.co/docs/trl/dataset_formats
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NotRequired, TypedDict, final

from stages.lib.core.params.data import SpeakerMarkers
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.reading import parse_json
from stages.lib.core.rows import Columns, HasPrompt, PairTexts, responses_of
from stages.lib.core.types import ROLES, Prompt, Row
from stages.lib.data.prompts import transcript
from stages.lib.metrics.text import words

Messages = list[dict[str, str]]
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {name: role for role, name in ROLES.items()}
# Of Anthropic's transcripts, ChatML, Llama 2 and Alpaca. Within a text they mean that the next turn
# was not cut off, or that a template was applied twice.
ROLE_MARKERS = (
    *("\n\nHuman:", "\n\nAssistant:", "<|im_start|>", "<|im_end|>"),
    *("[INST]", "[/INST]", "### Instruction:", "### Response:"),
)
# At the start of a line: the turn of another speaker ("Assistant: Human: And you?"), frequent in
# public preference data. A prompt that is one text may contain them: it is formatted by its author.
SPEAKER_MARKER = re.compile(r"^[ \t]*((?:Human|Assistant|User|System|AI|Bot)[ \t]*:)", re.MULTILINE)
# A turn of the user may contain another dialogue as its material ("Customer: ... AI: ..."). There,
# only the names of Anthropic's transcripts show that the next turn was not cut off.
TRANSCRIPT_MARKER = re.compile(r"^[ \t]*((?:Human|Assistant)[ \t]*:)", re.MULTILINE)
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
# A transcript in one text, without the blank lines by which Anthropic's is recognised
DIALOGUE = re.compile(r"\s*(Human|User)\s*:.*\b(Assistant|AI|Bot)\s*:", re.DOTALL)
READ_COLUMNS = {"prompt", "completion", "chosen", "rejected", "margin"}
# Columns that belong to what a model is shown
CONTEXT = re.compile(
    r"system(_?(prompt|message))?|history|tools|functions|(image|video|audio)s?", re.IGNORECASE
)
# Columns that say where a row is from, so that their text is no prompt
ORIGIN = re.compile(
    r"(^|[^a-z])(id|idx|index|hash|source|origin|dataset|subset|split|category|topic|domain|tags?"
    r"|type|lang|language|model|annotator|worker|date|time|timestamp|url|license|version)$"
    r"|chosen|rejected",
    re.IGNORECASE,
)
SCORE = re.compile("score|rating|reward", re.IGNORECASE)  # of a response
MIN_REPEATED_WORDS = 4  # a response may begin with a shorter prompt by chance
# Forms that are recognised only to name the next step, by the keys that they have
OTHER_FORMS = {
    ("instruction", "output"): "Alpaca: write instruction and input as `prompt`, and output as"
    " `completion`",
    ("conversations",): "ShareGPT: write the turns as messages with role and content, the last one"
    " as `completion`, those before it as `prompt`",
    ("messages",): "TRL's messages: write the last message as `completion`, those before it as"
    " `prompt`",
    ("question", "answer"): "a question and its answer: write them as `prompt` and `completion`",
}
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


SourceRow = SourceDemonstration | SourcePair


class Defect(Exception):
    """A reason why a row cannot be used."""


class AnotherSpeaker(Defect):
    """A turn that contains the marker of another speaker's turn."""


class Tie(Defect):
    """A pair in which neither text is better."""


def is_conversation(raw: Mapping[str, Any]) -> bool:
    """Whether a row has messages or a transcript."""
    return any(
        isinstance(value, list) or (isinstance(value, str) and value.startswith("\n\nHuman:"))
        for value in (raw.get("prompt"), raw.get("chosen"), raw.get("completion"))
    )


def form(raw: Any) -> str:
    """The name of a row's form, as in TRL's documentation; `unknown` for any other value.

    A row of a known form may still have a Defect.
    """
    if not isinstance(raw, dict):
        return "unknown"
    if raw.keys() >= {"chosen", "rejected"}:
        kind = f"preference, {'implicit' if raw.get('prompt') is None else 'explicit'} prompt"
        responses = [raw["chosen"], raw["rejected"]]
    elif raw.keys() >= {"prompt", "completion"}:
        kind, responses = "prompt-completion", [raw["completion"]]
    else:
        return "unknown"
    if all(isinstance(response, list) for response in responses):
        return f"conversational {kind}"
    texts = [text for text in (raw.get("prompt"), *responses) if isinstance(text, str)]
    if any(text.startswith("\n\nHuman:") for text in texts):
        return f"Anthropic transcript, {kind}"
    is_standard = all(isinstance(response, str) for response in responses)
    return f"standard {kind}" if is_standard else "unknown"


def normalise(
    raw: Any,
    prompt_format: PromptFormat,
    special_tokens: frozenset[str] = frozenset(),
    speaker_markers: SpeakerMarkers = SpeakerMarkers.drop,
    columns: Sequence[str] = (),
) -> Row:
    """Normalise a source row to {prompt, completion} or {prompt, chosen, rejected}.

    Args:
        raw: the row as read, of any type.
        prompt_format: decides the shape of the texts (see `shape`).
        special_tokens: of the tokenizer; no text may contain one.
        speaker_markers: whether a turn may contain the marker of another speaker.
        columns: prepare.columns, which are used elsewhere.

    Returns:
        The normalised row, with `margin` if the source row has one.

    Raises:
        Defect: the row cannot be used; the message is the reason. Tie: neither text is better.
            AnotherSpeaker: with `drop`, a turn contains the marker of another speaker.

    Example:
        >>> normalise({"chosen": "It is blue", "rejected": "It is red"}, PromptFormat.plain)
        {'prompt': 'It is', 'chosen': ' blue', 'rejected': ' red'}
    """
    if not isinstance(raw, dict):
        raise Defect("not a JSON object")
    if "chosen" in raw and "rejected" in raw:
        names: tuple[str, ...] = ("chosen", "rejected")
    elif "prompt" in raw and "completion" in raw:
        names = ("completion",)
    else:
        form_name = next((OTHER_FORMS[keys] for keys in OTHER_FORMS if raw.keys() >= {*keys}), "")
        raise Defect(
            "expected the keys prompt and completion, or chosen and rejected (with or without"
            f" prompt){form_name and '; this is ' + form_name}"
        )
    explicit_prompt = parse(raw["prompt"], "prompt") if raw.get("prompt") is not None else None
    values = [parse(raw[name], name) for name in names]
    check_columns(ignored_columns(raw, columns), explicit_prompt, values)
    prompt, responses = split_prompt(explicit_prompt, values, names)
    check_prompt(prompt)
    check_dialogue(prompt, responses, explicit_prompt is None, prompt_format)
    for name, response in zip(names, responses, strict=True):
        if not response.strip():
            raise Defect(f"`{name}` is empty")
        check_text(response, f"`{name}`")
    prompt_text = prompt if isinstance(prompt, str) else transcript(prompt)
    all_text = " ".join([prompt_text, *responses])
    for token in special_tokens:
        if token in all_text:
            raise Defect(f"contains the tokenizer's special token {token}")
    margin = read_margin(raw) if "chosen" in names else {}
    if "chosen" in names and not margin:
        check_scores(raw)
    if len({" ".join(response.split()) for response in responses}) < len(responses):
        raise Tie(SAME)
    if speaker_markers is SpeakerMarkers.drop:
        check_speakers(prompt, dict(zip(names, responses, strict=True)))
    prompt, *responses = shape(prompt, *responses, prompt_format=prompt_format)
    return {"prompt": prompt, **dict(zip(names, responses, strict=True)), **margin}


def ignored_columns(raw: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that are neither read nor in prepare.columns, and have a value; a long
    name is cut.
    """
    return {
        excerpt(name, 40): value
        for name, value in raw.items()
        if name not in READ_COLUMNS
        and name not in columns
        and value not in (None, "", [], {}, "[]", "{}")
    }


def check_columns(
    ignored: Mapping[str, Any], prompt: str | Messages | None, values: list[str | Messages]
) -> None:
    """Check that no ignored column has a part of the prompt, or the label of the response.

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
        if CONTEXT.fullmatch(name) and not (isinstance(value, str) and value.strip() in shown)
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
    if len(values) == 1 and any(ignored.get(name) in (0, 1) for name in ("label", "kto_tag")):
        raise Defect(
            "unpaired preference: `label` says whether the completion is good. Keep the good ones"
            " without the column, or write pairs; a label for rewards belongs into prepare.columns"
        )


def has_text(value: Any) -> bool:
    """Whether the value of a column is text, or a list of texts or messages."""
    if isinstance(value, list):
        return any(isinstance(item, str | dict) for item in value)
    return isinstance(value, str) and bool(value.strip())


def as_text(value: str | Messages) -> str:
    return value if isinstance(value, str) else transcript(value)


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


def check_scores(raw: Mapping[str, Any]) -> None:
    """Check that the scores of chosen and rejected, if there are any, are not all equal.

    Example:
        >>> check_scores({"score_chosen": 5, "score_rejected": 3})
    """
    scores = [
        (name, value, raw.get(name.replace("chosen", "rejected")))
        for name, value in raw.items()
        if "chosen" in name and SCORE.search(name) and isinstance(value, int | float)
    ]
    if scores and all(chosen == rejected for _, chosen, rejected in scores):
        name = scores[0][0]
        raise Tie(f"`{name}` and `{name.replace('chosen', 'rejected')}` are equal")


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
            raise AnotherSpeaker(f"another speaker: {name} has a line that begins with {match[1]}")


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


def parse(value: Any, name: str) -> str | Messages:
    """Check a source value and return it as text, or as messages if it is a list of messages or a
    transcript.
    """
    if isinstance(value, str):
        check_not_json(value, name)
        return parse_transcript(value, name) if value.startswith("\n\nHuman:") else value
    if not isinstance(value, list):
        raise Defect(f"`{name}` is {type(value).__name__}; expected text or a list of messages")
    for number, message in enumerate(value, 1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or message.get("role") not in [*ROLES]  # a role may be a list, too
        ):
            present = (
                f"the keys {excerpt(', '.join(message), 80)}, role {message.get('role')!r:.40} and"
                f" content of {type(message.get('content')).__name__}"
                if isinstance(message, dict)
                else type(message).__name__
            )
            raise Defect(
                f"message {number} of `{name}`: expected a role ({', '.join(ROLES)}) and a content"
                f" that is text, and it has {present}"
            )
        if not message["content"].strip() and number < len(value):
            raise Defect(f"message {number} of `{name}` is empty")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def check_not_json(text: str, name: str) -> None:
    """Check that a text is not a list of messages in JSON, as some Parquet files have it."""
    if re.match(r'\s*\[\s*\{\s*"(role|content|from|value)"', text):
        try:
            parse_json(text)
        except ValueError:
            return
        raise Defect(f"`{name}` is a text with messages in JSON; write them as a list of messages")


def parse_transcript(text: str, name: str) -> Messages:
    """Anthropic's form as messages; a last, empty "Assistant:" turn of a prompt is dropped."""
    parts = TURN.split(text)
    turns = [
        {"role": SPEAKERS[speaker], "content": content.strip()}
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if name == "prompt" and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    for number, turn in enumerate(turns[:-1], 1):
        if not turn["content"]:
            raise Defect(f"turn {number} of `{name}` is empty")
    return turns


def split_prompt(
    prompt: str | Messages | None, values: list[str | Messages], names: tuple[str, ...]
) -> tuple[Prompt, list[str]]:
    """Separate the prompt from the responses, whether the `values` repeat the prompt or not."""
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


def longer_prompt(prompt: str | Messages | None, repeated: Messages) -> Messages:
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
    yield row["prompt"] if isinstance(row["prompt"], str) else transcript(row["prompt"])
    yield from responses_of(row)


def excerpt(text: str, max_length: int = EXCERPT_CHARACTERS) -> str:
    """The first `max_length` characters of a text in one line; invalid Unicode is replaced."""
    line = " ".join(text[: 4 * max_length].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def row_excerpt(row: HasPrompt) -> str:
    """The beginnings of a normalised row's texts in one line."""
    texts = list(source_texts(row))
    return " | ".join(excerpt(text, EXCERPT_CHARACTERS // len(texts) - 3) for text in texts)
