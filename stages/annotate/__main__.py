"""The annotate stage: the pairs that the reward model learns from. The data's own pass through as
they are, and nothing is loaded.
"""

import shutil

from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.judging import Annotator
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main


def main(params: Params, round_: str) -> None:
    if params.annotate.annotator is Annotator.judge:
        from stages.annotate.ai_labels import (
            label_with_judge,  # torch and models, which people's labels do not need
        )

        label_with_judge(params, round_)
    else:
        copy_human_pairs(params, round_)


def copy_human_pairs(params: Params, round_: str) -> None:
    """prepare's pairs, byte for byte."""
    folder, source = (
        stage_dir(round_, "annotate"),
        stage_dir(round_, "prepare") / "data/pairs_train.jsonl",
    )
    pairs = len(read_jsonl(source, f"dvc repro prepare@{round_}"))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / "data" / source.name)
    write_manifest(folder, stage="annotate", round_=round_, seed=params.seed, inputs=[source])
    MetricLogger("annotate", round_).finish({"annotator": "dataset", "pairs": pairs})
    print(f"[annotate@{round_}] {pairs} pairs as the data labels them", flush=True)


if __name__ == "__main__":
    stage_main("annotate", main)
