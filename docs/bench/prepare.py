"""Measures seconds and memory of `prepare` on synthetic pairs.

`python docs/bench/prepare.py --pairs 200000` after `make run` (or `dvc repro assets`) prints JSON.
Words follow Zipf's law; a fifth of the prompts begins with one of twenty templates. 3% of the pairs
are copies, 3% are copies with an added word, 1% contradict another pair, and 1% contain another
pair's response, which is a leak if the split separates the two.
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
ROOT = Path(__file__).parents[2]


class Writer:
    """Writes texts of random words."""

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
        self.sampled, self.used = np.empty(0, dtype=object), 0

    def text(self, low: int, high: int) -> str:
        """A text of `low` to `high` - 1 words, in sentences of ten."""
        size = int(self.random.integers(low, high))
        # Words are sampled a million at a time: one call per text would be much slower.
        if self.used + size > len(self.sampled):
            indices = self.random.choice(VOCABULARY, 1_000_000, p=self.shares)
            self.sampled, self.used = self.words[indices], 0
        words, self.used = self.sampled[self.used : self.used + size].tolist(), self.used + size
        for index in range(9, size - 1, 10):
            words[index] += "."
        return " ".join(words) + "."


def write_pairs(path: Path, pairs: int, seed: int) -> None:
    """Write synthetic pairs as JSON lines; see the module's docstring for their defects."""
    writer, rng = Writer(seed), random.Random(seed)
    templates = [writer.text(8, 25) for _ in range(TEMPLATES)]
    rows: list[dict[str, str]] = []
    for _ in range(pairs):
        # below 0.03: copy, 0.06: copy with a word, 0.07: contradiction, 0.08: leak, else a new pair
        kind = rng.random() if len(rows) > 100 else 1.0
        earlier = dict(rng.choice(rows)) if kind < 0.08 else {}
        if 0.03 <= kind < 0.06:
            earlier["chosen"] += " anyway"
        elif 0.06 <= kind < 0.07:
            earlier["chosen"], earlier["rejected"] = earlier["rejected"], earlier["chosen"]
        if kind < 0.07:
            rows.append(earlier)
            continue
        template = rng.choice(templates) + "\n" if rng.random() < 0.2 else ""
        prompt = template + writer.text(5, 60)
        chosen, rejected = writer.text(10, 120), writer.text(10, 120)
        chosen = f" {earlier.get('chosen', '')}{chosen}"
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": f" {rejected}"})
    with path.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


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
        (folder / "assets/model").symlink_to(model)
        (folder / "assets/start").symlink_to(model.parent / "start")
        prepare = {"sources": [{"path": "pairs.jsonl"}], "max_prompt_tokens": 512}
        (folder / "params.yaml").write_text(
            yaml.safe_dump({"assets": {"data": "files"}, "prepare": prepare})
        )
        subprocess.run([sys.executable, "-m", "stages.assets.inputs"], cwd=folder, check=True)
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "stages.prepare"],
            cwd=folder,
            check=True,
            stdout=sys.stderr,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        seconds, usage = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        metrics = json.loads((folder / "rounds/r0/prepare/metrics.json").read_text())
    cost = {
        "seconds": round(seconds, 1),
        "user_seconds": round(usage.ru_utime, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
    }
    print(json.dumps({"pairs": options.pairs, **cost, "found": metrics}))


if __name__ == "__main__":
    main()
