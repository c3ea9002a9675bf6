"""The annotate stage: the preference pairs that the reward model is trained on.

With `annotate.annotator: dataset` prepare's pairs are copied byte for byte and no model is loaded.
With `judge` a judge labels pairs of SFT responses (stages/annotate/ai_labels.py). With
`annotate.revisions` a language model also revises SFT responses by a constitution (revisions.py).

Inputs: rounds/<round>/prepare/data; for a judge and revisions also rounds/<round>/sft.
Outputs: rounds/<round>/annotate/data/pairs_train.jsonl, revised.jsonl, manifest.json and
metrics.json.
Run: `python -m stages.annotate --round r0`.
"""

import shutil

from stages.lib.core.files import REVISED, stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.judging import Annotator
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import PreferencePair, read_rows
from stages.lib.core.stage import stage_main
from stages.lib.core.user_inputs import user_files


def main(params: Params, round_: str) -> None:
    """Label by a judge, or copy the pairs that people labelled."""
    if params.annotate.annotator is Annotator.judge:
        # imported here because it imports torch, which copying does not need
        from stages.annotate.ai_labels import label_with_judge

        label_with_judge(params, round_)
    else:
        copy_human_pairs(params, round_)


def copy_human_pairs(params: Params, round_: str) -> None:
    """Copy prepare's pairs, byte for byte; a language model may revise responses beside them."""
    folder = stage_dir(round_, "annotate")
    source = stage_dir(round_, "prepare") / "data/pairs_train.jsonl"
    pairs = len(read_rows(PreferencePair, source))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / "data" / source.name)
    recorder, revised = MetricLogger("annotate", round_), {}
    if params.annotate.revisions:
        from stages.annotate.revisions import revise_beside_people

        revised = revise_beside_people(params, recorder)
    else:
        write_jsonl(folder / REVISED, [])
    inputs = [source, *user_files(params)["constitution"]]
    write_manifest("annotate", round_, seed=params.seed, inputs=inputs)
    recorder.finish({"annotator": "dataset", "pairs": pairs, **revised})
    print(f"[annotate@{round_}] {pairs} pairs, labelled by the data set", flush=True)


if __name__ == "__main__":
    stage_main("annotate", main)
