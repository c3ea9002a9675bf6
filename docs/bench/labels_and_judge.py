"""How far the judges `lexicon` and `zero_shot` agree with the labels of the default run.

    dvc repro inputs assets prepare@r0 && python docs/bench/labels_and_judge.py

Prints the correlation of VADER's compound score with the human rating over all tweets, and which
text of each pair of round r0 each judge scores higher, by more than evaluate.tie_margin.
"""

from pathlib import Path

from stages.lib.core.params import load_params
from stages.lib.core.rows import PreferencePair, read_rows
from stages.lib.judging.lexicon import sentiment
from stages.lib.judging.loading import base_model, load_judge
from stages.lib.metrics.stats import pearson


def main() -> None:
    lines = Path("assets/data/tweets.tsv").read_text(encoding="utf-8").splitlines()
    _, ratings, texts = zip(*(line.split("\t", 2) for line in lines if line), strict=True)
    r = pearson(sentiment([""] * len(texts), texts), list(map(float, ratings)))
    print(f"{len(texts)} tweets: r = {r:.3f}")
    params = load_params()
    margin, base = params.evaluate.tie_margin, base_model(params)
    for named in ("lexicon", "zero_shot"):
        judge = load_judge(named, params, "r0", base)
        for name in ("pairs_eval", "pairs_train"):
            path = Path(f"rounds/r0/prepare/data/{name}.jsonl")
            pairs = read_rows(PreferencePair, path, "dvc repro prepare@r0")
            prompts = [pair["prompt"] for pair in pairs]
            chosen = judge.scores(prompts, [pair["chosen"] for pair in pairs]) or []
            rejected = judge.scores(prompts, [pair["rejected"] for pair in pairs]) or []
            gaps = [a - b for a, b in zip(chosen, rejected, strict=True)]
            higher = sum(gap > margin for gap in gaps)
            ties = sum(abs(gap) <= margin for gap in gaps)
            print(
                f"{named}, {name}: the chosen text scores higher in {higher} of {len(pairs)} "
                f"({higher / len(pairs):.1%}), {ties} ties, "
                f"{higher / (len(pairs) - ties):.1%} of the decided pairs"
            )


if __name__ == "__main__":
    main()
