"""Statistics of texts: repetition, diversity, suffixes and phrases.

Tokens here are words, emoji, emoticons and runs of one punctuation mark, in lower case; they are
not the tokens of a language model.
"""

import re
from collections import Counter
from collections.abc import Iterable

# One token each: an emoji with its modifiers and the emoji joined to it, an emoticon, a run of one
# punctuation mark.
PICTURE = (
    "[\u2190-\u21ff\u2300-\u23ff\u2460-\u24ff\u25a0-\u27bf"
    "\u2900-\u297f\u2b00-\u2bff\U0001f000-\U0001faff]"
)
MODIFIER = "[\ufe0f\ufe0e\u20e3\U0001f3fb-\U0001f3ff]"
EMOJI = re.compile(f"{PICTURE}{MODIFIER}*(?:\u200d{PICTURE}{MODIFIER}*)*")
EMOTICON = re.compile(r"[:;=][-'o^]?(?:[)(\]\[*]+|[DPpOo3](?!\w))|<3+")
TOKEN = re.compile(rf"{EMOJI.pattern}|{EMOTICON.pattern}|\w+(?:['\u2019]\w+)*|([^\w\s])\1*")


def tokens(text: str) -> list[str]:
    """The tokens of a text in lower case.

    >>> tokens("Don't STOP!!! :)")
    ["don't", 'stop', '!!!', ':)']
    """
    return [match.group().casefold() for match in TOKEN.finditer(text)]


def ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n words, in order."""
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Distinct n-grams as a share of all n-grams of the texts (Li et al. 2016).

    Low if the texts share a template; 0 if there are no n-grams.
    """
    grams = [gram for text in texts for gram in ngrams(tokens(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition_n(text: str, n: int) -> float:
    """Share of a text's n-grams that occur earlier in it; 0 for a text shorter than n."""
    grams = ngrams(tokens(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def strip_emoji_and_exclamations(text: str) -> str:
    """The text without emoji, emoticons and exclamation marks.

    Lexicons and reward models score these too high.
    """
    return " ".join(EMOTICON.sub(" ", EMOJI.sub(" ", text)).replace("!", " ").split())


def suffixes(text: str, longest: int = 3) -> list[str]:
    """The endings of a text, of 1 to `longest` tokens, as written, with their leading space.

    >>> suffixes("Well. Enjoy! :D")
    [' :D', '! :D', ' Enjoy! :D']
    """
    starts = [match.start() for match in TOKEN.finditer(text)][-longest:]
    return [
        text[start - (start > 0 and text[start - 1] == " ") :].rstrip()
        for start in reversed(starts)
    ]


def phrases(text: str, longest: int = 3) -> set[str]:
    """The n-grams of a text, of 1 to `longest` tokens, as written.

    Each word has a leading space, also the first one, so that a phrase can follow another text.

    >>> sorted(phrases("So fun!", longest=2))
    [' So', ' So fun', ' fun', ' fun!', '!']
    """
    spans = [match.span() for match in TOKEN.finditer(text)]
    texts = set()
    for n in range(1, longest + 1):
        for (start, _), (_, end) in zip(spans, spans[n - 1 :], strict=False):
            texts.add((" " if start == 0 or text[start - 1].isspace() else "") + text[start:end])
    return texts


def suffix_counts(texts: Iterable[str], longest: int = 3) -> Counter[str]:
    """Number of texts that end in each suffix."""
    return Counter(suffix for text in texts for suffix in set(suffixes(text, longest)))
