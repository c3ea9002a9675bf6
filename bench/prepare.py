"""Seconds and memory of prepare on made-up pairs, JSON on stdout: `python bench/prepare.py --pairs
200000` after `make run` (or assets).

The words follow Zipf's law; a fifth of the prompts begins with one of twenty templates. Of the
pairs 3% are copies, 3% copies but for a word, 1% contradict another, and 1% carry a sentence of
another pair's response, which is a leak where the split parts the two.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml

VOCABULARY = 50_000
TEMPLATES = 20
ROOT = Path(__file__).parents[1]


class Writer:
    """Texts of random words."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        letters = np.array(list("etaoinshrdlucmfwypvbgk"))
        spelled = [
            "".join(self.random.choice(letters, size))
            for size in self.random.integers(2, 9, VOCABULARY)
        ]
        self.words = np.array(spelled, dtype=object)
        self.shares = 1 / np.arange(1, VOCABULARY + 1)
        self.shares /= self.shares.sum()
        self.drawn, self.used = np.empty(0, dtype=object), 0

    def text(self, least: int, most: int) -> str:
        size = int(self.random.integers(least, most))
        if self.used + size > len(self.drawn):
            self.drawn, self.used = (
                self.words[self.random.choice(VOCABULARY, 1_000_000, p=self.shares)],
                0,
            )
        words, self.used = self.drawn[self.used : self.used + size].tolist(), self.used + size
        for place in range(9, size - 1, 10):
            words[place] += "."
        return " ".join(words) + "."


def write_pairs(path: Path, pairs: int, seed: int) -> None:
    writer, chance = Writer(seed), random.Random(seed)
    templates = [writer.text(8, 25) for _ in range(TEMPLATES)]
    made: list[dict[str, str]] = []
    for _ in range(pairs):
        kind = chance.random() if len(made) > 100 else 1.0
        before = dict(chance.choice(made)) if kind < 0.08 else {}
        if 0.03 <= kind < 0.06:
            before["chosen"] += " anyway"
        elif 0.06 <= kind < 0.07:
            before["chosen"], before["rejected"] = before["rejected"], before["chosen"]
        if kind < 0.07:
            made.append(before)
            continue
        template = chance.choice(templates) + "\n" if chance.random() < 0.2 else ""
        prompt, chosen, rejected = (
            template + writer.text(5, 60),
            writer.text(10, 120),
            writer.text(10, 120),
        )
        made.append(
            {
                "prompt": prompt,
                "chosen": f" {before.get('chosen', '')}{chosen}",
                "rejected": f" {rejected}",
            }
        )
    with path.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = Path("assets/model").resolve()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(folder / "pairs.jsonl", options.pairs, options.seed)
        (folder / "assets/data").mkdir(parents=True)
        (folder / "assets/data/sources.json").write_text("[]")
        (folder / "assets/model").symlink_to(model)
        (folder / "assets/start").symlink_to(model.parent / "start")
        prepare = {"sources": [{"path": "pairs.jsonl"}], "max_prompt_tokens": 512}
        (folder / "params.yaml").write_text(
            yaml.safe_dump({"assets": {"data": "files"}, "prepare": prepare})
        )
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "stages.prepare"],
            cwd=folder,
            check=True,
            stdout=sys.stderr,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads((folder / "rounds/r0/prepare/metrics.json").read_text())
    cost = {
        "seconds": round(seconds, 1),
        "user_seconds": round(used.ru_utime, 1),
        "peak_gib": round(used.ru_maxrss / 2**20, 2),
    }
    print(json.dumps({"pairs": options.pairs, **cost, "found": found}))


if __name__ == "__main__":
    main()
