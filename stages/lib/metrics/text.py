"""Statistics of texts: repetition, diversity, suffixes and phrases.

Tokens here are words, emoji, emoticons and runs of one punctuation mark, in lower case; they are
not the tokens of a language model. In scripts without spaces, each character is a word.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import fmean

import numpy as np
from scipy.stats import hypergeom

# So many n-grams of all texts, and words of one text, that the numbers of few short texts and of
# many long ones mean the same.
NGRAMS_DRAWN = 200
WINDOW_WORDS = 50
LENGTH_TOLERANCE = 0.2

# One token each: an emoji with its modifiers and the emoji joined to it, an emoticon, a run of one
# punctuation mark.
PICTURE = (
    "[\u2190-\u21ff\u2300-\u23ff\u2460-\u24ff\u25a0-\u27bf"
    "\u2900-\u297f\u2b00-\u2bff\U0001f000-\U0001faff]"
)
MODIFIER = "[\ufe0f\ufe0e\u20e3\U0001f3fb-\U0001f3ff]"
EMOJI = re.compile(f"{PICTURE}{MODIFIER}*(?:\u200d{PICTURE}{MODIFIER}*)*")
EMOTICON = re.compile(r"[:;=][-'o^]?(?:[)(\]\[*]+|[DPpOo3](?!\w))|<3+")
# Thai and Lao; Tibetan; Myanmar; Khmer; kana; Han: written without spaces between words
UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Vowel signs and accents (not the modifiers of emoji): of the letter before them, but not in \w
MARKS = "".join(
    chr(code) for code in range(0x300, 0x2000) if unicodedata.category(chr(code))[0] == "M"
)
LETTERS = rf"[^\W{UNSPACED}]+(?:[{MARKS}]+[^\W{UNSPACED}]*)*"
TOKEN = re.compile(
    rf"{EMOJI.pattern}|{EMOTICON.pattern}|{LETTERS}(?:['\u2019]{LETTERS})*"
    rf"|(?=\w)[{UNSPACED}][{MARKS}]*|([^\w\s])\1*"
)
# As `str.split`, with the marks and punctuation after a character of UNSPACED
WORD = re.compile(rf"[{UNSPACED}][^\w\s]*|[^\s{UNSPACED}]+")


def alike_in_length(a: str, b: str) -> bool:
    """Whether two texts differ by at most a fifth of the longer one's characters.

    >>> alike_in_length("12345", "1234"), alike_in_length("12345", "123")
    (True, False)
    """
    return abs(len(a) - len(b)) <= LENGTH_TOLERANCE * max(len(a), len(b))


def tokens(text: str) -> list[str]:
    """The tokens of a text in lower case.

    >>> tokens("Don't STOP!!! :)")
    ["don't", 'stop', '!!!', ':)']
    """
    return [match.group().casefold() for match in TOKEN.finditer(text)]


def words(text: str) -> Iterator[re.Match[str]]:
    """The words of a text as written, with their punctuation.

    >>> [word[0] for word in words("Oh, well. \u6211\u6765\u3002")]
    ['Oh,', 'well.', '\u6211', '\u6765\u3002']
    """
    return WORD.finditer(text)


def is_unspaced(text: str) -> bool:
    """Whether a text begins with a character that is a word."""
    return re.match(f"[{UNSPACED}]", text) is not None


def ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n words, in order."""
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Distinct n-grams as a share of n-grams of the texts (Li et al. 2016), expected for a draw of
    NGRAMS_DRAWN (or all, if they are fewer) without replacement (rarefaction, Hurlbert 1971).

    The share of all n-grams would fall with the number and the length of the texts. Low if the
    texts share a template; 0 if there are no n-grams.
    """
    counts = Counter(gram for text in texts for gram in ngrams(tokens(text), n))
    total = counts.total()
    if not total:
        return 0.0
    drawn = min(total, NGRAMS_DRAWN)
    # by how often an n-gram occurs: the number of such n-grams, each absent from the draw or not
    occurrences, numbers = np.array(sorted(Counter(counts.values()).items())).T
    present = 1 - hypergeom.pmf(0, total, occurrences, drawn)
    return float((numbers * present).sum() / drawn)


def repetition_n(text: str, n: int) -> float:
    """Share of n-grams that occur earlier in the same WINDOW_WORDS words, mean over the windows of
    a text; 0 for a text shorter than n.

    The share of a whole text would rise with its length.
    """
    words = tokens(text)
    last = max(len(words) - WINDOW_WORDS, 0)
    starts = sorted({*range(0, last, WINDOW_WORDS), last})
    windows = (ngrams(words[start : start + WINDOW_WORDS], n) for start in starts)
    return fmean(1 - len(set(grams)) / len(grams) if grams else 0.0 for grams in windows)


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

    Each word has a leading space, also the first one, so that a phrase can follow another text; in
    a script without spaces none has one.

    >>> sorted(phrases("So fun!", longest=2))
    [' So', ' So fun', ' fun', ' fun!', '!']
    """
    spans = [match.span() for match in TOKEN.finditer(text)]
    texts = set()
    for n in range(1, longest + 1):
        for (start, _), (_, end) in zip(spans, spans[n - 1 :], strict=False):
            follows_space = text[start - 1].isspace() if start else not is_unspaced(text)
            texts.add((" " if follows_space else "") + text[start:end])
    return texts


def suffix_counts(texts: Iterable[str], longest: int = 3) -> Counter[str]:
    """Number of texts that end in each suffix."""
    return Counter(suffix for text in texts for suffix in set(suffixes(text, longest)))
