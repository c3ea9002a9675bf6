"""The capability stage: how much worse is the policy than SFT on your prompts and tasks?

Reads slices/ (prompts labelled safe or unsafe, and lm-eval tasks), prepare's training data, the SFT
model and the policy. Writes samples.jsonl and metrics.json to rounds/<round>/capability. Without
slices and capability.tasks no model is loaded, and the metrics are null.

Run: `python -m stages.capability --round r0`.
"""

from collections.abc import Mapping, Sequence

from stages.lib.core.files import stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import TrainingPrompt, read_rows
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Metrics
from stages.lib.data.slices import SLICES, check_not_in_slices, read_slices
from stages.lib.data.splits import TRAIN


def main(params: Params, round_: str) -> None:
    # 1. the prompts of slices/, none of which may be trained on
    slices, recorder = read_slices(), MetricLogger("capability", round_)
    data = stage_dir(round_, "prepare") / "data"
    training_rows = (
        (name, row)
        for name in TRAIN.values()
        for row in read_rows(TrainingPrompt, data / f"{name}.jsonl")
    )
    check_not_in_slices(
        (f"{name} of {round_}, row {row['id']}: its prompt", row["prompt"])
        for name, row in training_rows
    )

    # 2. SFT and policy, sampled alike
    metrics: dict[str, Metrics] = {}
    responses: Sequence[Mapping[str, object]] = []
    if slices or params.capability.tasks:
        from stages.capability.measure import measure  # imports torch, which takes seconds

        metrics, responses = measure(params, round_, slices)

    # 3. write
    folder = stage_dir(round_, "capability")
    worst = max(metrics, key=lambda name: metrics[name]["fall_high"], default=None)
    write_jsonl(folder / "samples.jsonl", responses)
    models = [stage_dir(round_, name) for name in ("sft/model", "ppo/policy")]
    inputs = [*sorted(SLICES.glob("*.*")), *models]
    write_manifest("capability", round_, seed=params.seed, inputs=inputs)
    worst_fall = metrics[worst]["fall_high"] if worst else None
    recorder.finish({"slices": metrics, "worst": worst, "worst_fall": worst_fall})
    for name, row in metrics.items():
        fall = f"{row['fall']:.3f} [{row['fall_low']:.3f}, {row['fall_high']:.3f}]"
        change = f"{row['sft']:.3f} -> {row['policy']:.3f}, worse by {fall}"
        print(f"[capability@{round_}] {name}: {change}", flush=True)
    if not metrics:
        message = "nothing to measure: slices/ and capability.tasks are empty (docs/evaluation.md)"
        print(f"[capability@{round_}] {message}", flush=True)


if __name__ == "__main__":
    stage_main("capability", main)
