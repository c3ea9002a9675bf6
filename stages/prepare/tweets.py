"""The embedded task: continue a tweet's opening words. Human ratings make the demonstrations and
the preferences.
"""

import html
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Row
from stages.lib.data.splits import hold_out
from stages.prepare.audit import BAD, Audit
from stages.prepare.formats import shape

LINK_OR_HANDLE = r"(?:https?://\S+|www\.\S+|[@.]*@\w+:?)"
AT_THE_ENDS = re.compile(
    rf"^(?:(?:{LINK_OR_HANDLE}|RT|and|&|[-:,.;|])\s+)*(?:{LINK_OR_HANDLE}\s+)+"
    rf"|(?:\s+(?:{LINK_OR_HANDLE}|via|cc|/cc|[-:(]))+$",
    re.IGNORECASE,
)
PROFANITY = re.compile(
    r"\b(?:\w*fuck|\w*shit\b|\w*shitt|bitch|damn|goddam|(?:bad|dumb|jack|kick|smart)?ass(?:es)?\b|asshole|dicks?\b|dickhead|cunt|whore|slut"
    r"|piss|bastard|crap|hell\b|fags?\b|faggot|nigg(?:a|er)|douche|cocks?\b|puss(?:y|ies)\b|wtf|stfu|lma?f?ao|sex|porn|suck|tits?\b|boob"
    r"|penis|vagina|raped?\b|rapist|retard)",
    re.IGNORECASE,
)
NEUTRAL = 0.5  # a text rated within +- this has an opening that leaves both ways open
LEFT_TO_CONTINUE = 2  # words after the prompt, at least
MEETINGS = {
    "train": 2,
    "eval": 3,
}  # pairs that a text is in, at most; more of them held out, for a narrower interval


def tweet_sets(path: Path, params: Params, tokenizer: Any, audit: Audit) -> dict[str, list[Row]]:
    """The six data sets; no text, and no opening of `prompt_words` words, is on both sides of the
    split.

    Demonstrations are the clearly positive texts. Preference pairs are two texts with the same
    first word, the better-rated one chosen. Prompts are the openings of texts that people rated
    neutral.
    """
    config = params.prepare
    texts = clean(read(path, config.max_rows, audit), config.prompt_words, audit)
    audit.check_bad_share(config.max_bad_share)
    texts = audit.drop_duplicates(
        texts, [("", " ".join(text["words"])) for text in texts], config.near_duplicate
    )
    prompts = (
        shape(" ".join(text["words"][: config.prompt_words]), prompt_format=config.prompt_format)[0]
        for text in texts
    )
    texts = audit.drop_long_prompts(texts, prompts, tokenizer, config)
    audit.rows_kept = len(texts)
    held_out = hold_out(
        (opening(text["words"], config.prompt_words) for text in texts),
        config.eval_share,
        params.seed,
    )
    sets: dict[str, list[Row]] = {}
    for part in ("train", "eval"):
        texts_here = [
            text
            for text in texts
            if (opening(text["words"], config.prompt_words) in held_out) == (part == "eval")
        ]
        positive = [text for text in texts_here if text["rating"] >= config.demonstration_rating]
        sets[f"sft_{part}"] = [
            demonstration(text, config.prompt_words, config.prompt_format) for text in positive
        ]
        sets[f"pairs_{part}"] = preference_pairs(
            texts_here, config.min_rating_gap, MEETINGS[part], config.prompt_format
        )
        neutral = [text for text in texts_here if abs(text["rating"]) <= NEUTRAL]
        sets[f"prompts_{part}"] = openings(neutral, config.prompt_words, config.prompt_format)
    eval_prompts = sets.pop("prompts_eval")
    random.Random(params.seed).shuffle(eval_prompts)
    sets["eval_prompts"] = [
        {"id": row["id"], "prompt": row["prompt"]}
        for row in eval_prompts[: config.max_eval_prompts]
    ]
    return sets


def read(path: Path, max_rows: int | None, audit: Audit) -> list[Row]:
    """Lines `id, mean rating -4..4, text`, tab-separated."""
    rows = []
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")[:max_rows]
    audit.rows_read[path.name] = len(lines)
    for number, line in enumerate(lines, 1):
        fields = line.split("\t", 2)
        where = f"{path.name}:{number}"
        if len(fields) != 3 or not re.fullmatch(r"-?\d+(\.\d+)?", fields[1]):
            audit.lose(BAD, where, line, reason="expected id, rating and text, separated by tabs")
        elif abs(float(fields[1])) > 4:
            audit.lose(BAD, where, line, reason="the rating is not within -4..4")
        elif not fields[2].strip():
            audit.lose(BAD, where, line, reason="the text is empty")
        else:
            rows.append(
                {"id": fields[0], "rating": float(fields[1]), "text": fields[2], "where": where}
            )
    return rows


def clean(rows: list[Row], prompt_words: int, audit: Audit) -> list[Row]:
    """Entities decoded, links and handles cut off at both ends.

    Dropped and counted: texts with a link or handle in the middle (cut out, it would leave a hole
    in the sentence), profane ones, and those too short to have a prompt.
    """
    kept = []
    for row in rows:
        text = AT_THE_ENDS.sub("", " ".join(html.unescape(row["text"]).split())).strip()
        if re.search(LINK_OR_HANDLE, text, re.IGNORECASE):
            audit.lose("link or handle within the text", row["where"], row["text"])
        elif PROFANITY.search(text):
            audit.lose("profanity", row["where"], row["text"])
        elif len(words := text.split()) < prompt_words + LEFT_TO_CONTINUE:
            audit.lose("too short", row["where"], row["text"])
        else:
            kept.append({**row, "words": words})
    return kept


def opening(words: list[str], number: int) -> str:
    return " ".join(words[:number]).casefold()


def demonstration(text: Row, prompt_words: int, prompt_format: PromptFormat) -> Row:
    words = text["words"]
    prompt, completion = shape(
        " ".join(words[:prompt_words]),
        " " + " ".join(words[prompt_words:]),
        prompt_format=prompt_format,
    )
    return {
        "id": f"tweet-{text['id']}",
        "prompt": prompt,
        "completion": completion,
        "source": "tweets",
    }


def openings(texts: list[Row], prompt_words: int, prompt_format: PromptFormat) -> list[Row]:
    """One prompt for each distinct opening."""
    distinct = {opening(text["words"], prompt_words): text for text in reversed(texts)}
    rows = [
        demonstration(text, prompt_words, prompt_format) for text in reversed(distinct.values())
    ]
    return [{"id": row["id"], "prompt": row["prompt"], "source": row["source"]} for row in rows]


def preference_pairs(
    texts: list[Row], min_gap: float, meetings: int, prompt_format: PromptFormat
) -> list[Row]:
    """Pairs of texts with the same first word (case and punctuation aside), mean ratings more than
    `min_gap` apart.

    Among the texts of a first word, sorted by rating, the i-th of the upper half meets the i-th,
    and the next, of the lower half: every text is in at most `meetings` pairs, and the two ratings
    are about half the range apart.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for text in texts:
        groups[
            re.sub(r"^\W+|\W+$", "", opening(text["words"], 1)) or opening(text["words"], 1)
        ].append(text)
    pairs = []
    for group in groups.values():
        group.sort(key=lambda text: (-text["rating"], text["where"]))
        half = len(group) // 2
        upper, lower = group[:half], group[len(group) - half :]
        met = {(i, (i + step) % half) for i in range(half) for step in range(meetings)}
        pairs += [
            (upper[i], lower[j])
            for i, j in sorted(met)
            if upper[i]["rating"] - lower[j]["rating"] > min_gap
        ]
    rows = []
    for better, worse in pairs:
        rest = (" " + " ".join(text["words"][1:]) for text in (better, worse))
        prompt, chosen, rejected = shape(better["words"][0], *rest, prompt_format=prompt_format)
        pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        rows.append({"id": f"tweet-{better['id']}-{worse['id']}", **pair, "source": "tweets"})
    return rows
