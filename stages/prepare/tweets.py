"""The embedded task: continue the opening words of a tweet.

Human sentiment ratings of whole tweets make the demonstrations (positive tweets) and the
preferences (the better-rated of two tweets).
"""

import html
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.reading import read_text
from stages.lib.core.rows import Demonstration, PreferencePair, TrainingPrompt
from stages.lib.data.splits import DataSets, hold_out
from stages.prepare.audit import BAD, Audit
from stages.prepare.normalise import shape

LINK_OR_HANDLE = r"(?:https?://\S+|www\.\S+|[@.]*@\w+:?)"
AT_THE_ENDS = re.compile(
    rf"^(?:(?:{LINK_OR_HANDLE}|RT|and|&|[-:,.;|])\s+)*(?:{LINK_OR_HANDLE}\s+)+"
    rf"|(?:\s+(?:{LINK_OR_HANDLE}|via|cc|/cc|[-:(]))+$",
    re.IGNORECASE,
)
PROFANITY = re.compile(
    r"\b(?:\w*fuck|\w*shit\b|\w*shitt|bitch|damn|goddam"
    r"|(?:bad|dumb|jack|kick|smart)?ass(?:es)?\b|asshole|dicks?\b|dickhead|cunt|whore|slut"
    r"|piss|bastard|crap|hell\b|fags?\b|faggot|nigg(?:a|er)|douche|cocks?\b|puss(?:y|ies)\b"
    r"|wtf|stfu|lma?f?ao|sex|porn|suck|tits?\b|boob|penis|vagina|raped?\b|rapist|retard)",
    re.IGNORECASE,
)
NEUTRAL = 0.5  # the opening of a text rated within +- this can be continued either way
MIN_COMPLETION_WORDS = 2
# At most; more for held-out texts, for a narrower interval of the reward model's accuracy.
MAX_PAIRS_PER_TEXT = {"train": 2, "eval": 3}


class RatedText(TypedDict):
    """A tweet. rating: the mean of several people's, -4 to 4. words: after cleaning."""

    id: str
    rating: float
    text: str
    where: str
    words: NotRequired[list[str]]


def tweet_sets(path: Path, params: Params, tokenizer: Any, audit: Audit) -> DataSets:
    """Make the six data sets from rated tweets; no text, and no opening of `prompt_words` words, is
    on both sides of the split.

    Demonstrations are the clearly positive texts. Preference pairs are two texts with the same
    first word, the better-rated one chosen. Prompts are the openings of texts that people rated
    neutral.

    Raises:
        BadInput: too many lines are bad.
    """
    config = params.prepare
    texts = clean(read(path, config.max_rows, audit), config.prompt_words, audit)
    audit.check_bad_share(config.max_bad_share)
    full_texts = [("", " ".join(text["words"])) for text in texts]
    texts = audit.drop_duplicates(texts, full_texts, config.near_duplicate)

    def shaped(text: RatedText) -> Demonstration:
        return demonstration(text, config.prompt_words, config.prompt_format)

    def first_words(text: RatedText) -> str:
        return opening(text["words"], config.prompt_words)

    prompts = (shaped(text)["prompt"] for text in texts)
    texts = audit.drop_long_prompts(texts, prompts, tokenizer, config)
    audit.rows_kept = len(texts)
    held_out = hold_out(map(first_words, texts), config.eval_share, params.seed)
    sets: DataSets = {}
    for part in ("train", "eval"):
        part_texts = [text for text in texts if (first_words(text) in held_out) == (part == "eval")]
        positive = [text for text in part_texts if text["rating"] >= config.demonstration_rating]
        sets[f"sft_{part}"] = list(map(shaped, positive))
        sets[f"pairs_{part}"] = preference_pairs(
            part_texts, config.min_rating_gap, MAX_PAIRS_PER_TEXT[part], config.prompt_format
        )
        neutral = [text for text in part_texts if abs(text["rating"]) <= NEUTRAL]
        sets[f"prompts_{part}"] = openings(neutral, config.prompt_words, config.prompt_format)
    eval_prompts = list(sets.pop("prompts_eval"))
    random.Random(params.seed).shuffle(eval_prompts)
    sets["eval_prompts"] = [
        {"id": row["id"], "prompt": row["prompt"]}
        for row in eval_prompts[: config.max_eval_prompts]
    ]
    return sets


def read(path: Path, max_rows: int | None, audit: Audit) -> list[RatedText]:
    """Read tab-separated lines `id, mean rating -4 to 4, text`; bad lines go to the audit."""
    rows: list[RatedText] = []
    text = read_text(path, "run `dvc repro -f assets`, which writes it again")
    lines = text.removesuffix("\n").split("\n")[:max_rows]
    audit.rows_read[path.name] = len(lines)
    for number, line in enumerate(lines, 1):
        fields, location, reason = line.split("\t", 2), f"{path.name}:{number}", ""
        if len(fields) != 3 or not re.fullmatch(r"-?\d+(\.\d+)?", fields[1]):
            reason = "expected id, rating and text, separated by tabs"
        elif abs(float(fields[1])) > 4:
            reason = "the rating is not within -4..4"
        elif not fields[2].strip():
            reason = "the text is empty"
        if reason:
            audit.record_drop(BAD, location, line, reason=reason)
        else:
            row_id, rating, text = fields
            rows.append({"id": row_id, "rating": float(rating), "text": text, "where": location})
    return rows


def clean(rows: list[RatedText], prompt_words: int, audit: Audit) -> list[RatedText]:
    """Decode HTML entities, and cut links and handles off both ends; returns rows with `words`.

    Dropped, with an entry in the audit: texts with a link or handle in the middle (without it the
    sentence would have a gap), profane texts, and texts too short for a prompt and a completion.
    """
    kept: list[RatedText] = []
    for row in rows:
        text = AT_THE_ENDS.sub("", " ".join(html.unescape(row["text"]).split())).strip()
        if re.search(LINK_OR_HANDLE, text, re.IGNORECASE):
            audit.record_drop("link or handle within the text", row["where"], row["text"])
        elif PROFANITY.search(text):
            audit.record_drop("profanity", row["where"], row["text"])
        elif len(words := text.split()) < prompt_words + MIN_COMPLETION_WORDS:
            audit.record_drop("too short", row["where"], row["text"])
        else:
            kept.append({**row, "words": words})
    return kept


def opening(words: list[str], number: int) -> str:
    """The first words in lower case."""
    return " ".join(words[:number]).casefold()


def demonstration(text: RatedText, prompt_words: int, prompt_format: PromptFormat) -> Demonstration:
    """The text as a row of prompt (its first `prompt_words` words) and completion (the rest)."""
    words = text["words"]
    first, rest = " ".join(words[:prompt_words]), " " + " ".join(words[prompt_words:])
    prompt, completion = shape(first, rest, prompt_format=prompt_format)
    return {
        "id": f"tweet-{text['id']}",
        "prompt": prompt,
        "completion": completion,
        "source": "tweets",
    }


def openings(
    texts: list[RatedText], prompt_words: int, prompt_format: PromptFormat
) -> list[TrainingPrompt]:
    """One prompt per distinct opening."""
    distinct = {opening(text["words"], prompt_words): text for text in reversed(texts)}
    rows = [
        demonstration(text, prompt_words, prompt_format) for text in reversed(distinct.values())
    ]
    return [{"id": row["id"], "prompt": row["prompt"], "source": row["source"]} for row in rows]


def preference_pairs(
    texts: list[RatedText], min_gap: float, max_pairs: int, prompt_format: PromptFormat
) -> list[PreferencePair]:
    """Pairs of texts with the same first word (ignoring case and punctuation), with mean ratings
    more than `min_gap` apart.

    Among the texts of a first word, sorted by rating, the i-th of the upper half is paired with the
    i-th and the next ones of the lower half: every text is in at most `max_pairs` pairs, and the
    two ratings are about half the range apart.
    """
    groups: dict[str, list[RatedText]] = defaultdict(list)
    for text in texts:
        first_word = opening(text["words"], 1)
        groups[re.sub(r"^\W+|\W+$", "", first_word) or first_word].append(text)
    pairs = []
    for group in groups.values():
        group.sort(key=lambda text: (-text["rating"], text["where"]))
        half = len(group) // 2
        upper, lower = group[:half], group[len(group) - half :]
        indices = {(i, (i + step) % half) for i in range(half) for step in range(max_pairs)}
        pairs += [
            (upper[i], lower[j])
            for i, j in sorted(indices)
            if upper[i]["rating"] - lower[j]["rating"] > min_gap
        ]
    rows: list[PreferencePair] = []
    for better, worse in pairs:
        rests = (" " + " ".join(text["words"][1:]) for text in (better, worse))
        prompt, chosen, rejected = shape(better["words"][0], *rests, prompt_format=prompt_format)
        rows.append(
            {
                "id": f"tweet-{better['id']}-{worse['id']}",
                "prompt": prompt,
                "chosen": chosen,
                "rejected": rejected,
                "source": "tweets",
            }
        )
    return rows
