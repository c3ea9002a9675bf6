"""How distinct-2 depends on the length of texts, and on templates that they share.

    python bench/variety.py texts.jsonl [FIELD, default chosen] [TEXTS, default 150]

Texts of the field are cut to 13, 60 and 150 words, and the end of each is replaced by that of one
of a few templates. The table has the share of all 2-grams, which falls with the length, and the
measure of stages/lib/metrics/text.py, by the share of the text that the templates take.
"""

import random
import sys
from pathlib import Path

from stages.lib.core.files import read_jsonl
from stages.lib.metrics.text import distinct_n, ngrams, tokens

SHARES = (0.0, 0.3, 0.5, 0.66, 0.8)


def share_of_all(texts: list[str]) -> float:
    """Distinct 2-grams as a share of all 2-grams of the texts."""
    grams = [gram for text in texts for gram in ngrams(tokens(text), 2)]
    return len(set(grams)) / len(grams)


def with_templates(texts: list[str], templates: list[str], share: float) -> list[str]:
    """Texts whose last `share` of the words is that of a template, drawn with seed 0."""
    rng, result = random.Random(0), []
    for text in texts:
        words, template = text.split(), rng.choice(templates).split()
        kept = round(len(words) * (1 - share))
        result.append(" ".join([*words[:kept], *template[kept:]]))
    return result


if __name__ == "__main__":
    path, field, number = [*sys.argv[1:], "chosen", "150"][:3]
    values = [row[field] for row in read_jsonl(Path(path), "FILE")]
    # a text, or messages
    texts = [value if isinstance(value, str) else value[-1]["content"] for value in values]
    texts = list(dict.fromkeys(texts))
    random.Random(0).shuffle(texts)
    print("words  texts  templates  share of template  of all  of 200 drawn")
    for words in (13, 60, 150):
        cut = [" ".join(tokens(text)[:words]) for text in texts if len(tokens(text)) >= words]
        shared = cut[:4]
        for templates in (1, 4):
            for share in SHARES:
                mixed = with_templates(cut[4 : int(number) + 4], shared[:templates], share)
                print(
                    f"{words:5}  {len(mixed):5}  {templates:9}  {share:17}"
                    f"  {share_of_all(mixed):6.2f}  {distinct_n(mixed, 2):12.2f}"
                )
