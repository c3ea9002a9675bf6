"""Counts the tokens of a round's texts: `python -m flows.execution.token_counts ROUND` prints JSON.

Keys: demonstrations, pairs, prompts: per row the tokens of its texts, as the stages render them;
slices: tokens of each prompt of slices/; evaluation: the number of frozen prompts. A process of its
own, like matmul_speed.py.
"""

import json
import sys

from stages.lib.core.files import ASSETS, read_jsonl, stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.rows import SIDES
from stages.lib.data.prompts import encode
from stages.lib.data.slices import read_slices
from stages.lib.lm.loading import load_tokenizer

ROWS = 4096  # of a file, at most


def main(round_: str) -> None:
    prompt_format = load_params().prepare.prompt_format
    tokenizer = load_tokenizer(ASSETS / "model")
    data, made_by = stage_dir(round_, "prepare") / "data", f"dvc repro prepare@{round_}"

    def lengths(name: str, *columns: str) -> list[list[int]]:
        rows = read_jsonl(data / f"{name}.jsonl", made_by)[:ROWS]
        return [
            [
                sum(map(len, encode(tokenizer, row["prompt"], row.get(column), prompt_format)))
                for column in columns
            ]
            for row in rows
        ]

    counts = {
        "demonstrations": lengths("sft_train", "completion"),
        "pairs": lengths("pairs_train", *SIDES),
        "prompts": lengths("prompts_train", ""),
        "slices": [
            len(encode(tokenizer, row.prompt, None, prompt_format)[0])
            for rows in read_slices().values()
            for row in rows.values()
        ],
        "evaluation": len(read_jsonl(data / "eval_prompts.jsonl", made_by)),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1])
