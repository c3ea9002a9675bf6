"""The capability stage. Where nothing is asked for, nothing is loaded."""

from stages.lib.core.files import read_jsonl, stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row
from stages.lib.data.slices import SLICES, check_not_in_slices, read_slices
from stages.lib.data.splits import TRAIN


def main(params: Params, round_: str) -> None:
    # 1. what people want looked at, which nobody may train on
    folder, slices, recorder = (
        stage_dir(round_, "capability"),
        read_slices(),
        MetricLogger("capability", round_),
    )
    data, made_by = stage_dir(round_, "prepare") / "data", f"dvc repro prepare@{round_}"
    trained_on = (
        (name, row)
        for name in TRAIN.values()
        for row in read_jsonl(data / f"{name}.jsonl", made_by)
    )
    check_not_in_slices(
        (f"{name} of {round_}, row {row['id']}: its prompt", row["prompt"])
        for name, row in trained_on
    )

    # 2. SFT and policy, asked alike
    told: dict[str, Row] = {}
    answers: list[Row] = []
    if slices or params.capability.tasks:
        from stages.capability.measure import measure  # torch and models

        told, answers = measure(params, round_, slices)

    # 3. write
    worst = max(told, key=lambda name: told[name]["fall_high"], default=None)
    write_jsonl(folder / "samples.jsonl", answers)
    inputs = [
        *sorted(SLICES.glob("*.*")),
        *(stage_dir(round_, name) for name in ("sft/model", "ppo/policy")),
    ]
    write_manifest(folder, stage="capability", round_=round_, seed=params.seed, inputs=inputs)
    recorder.finish(
        {"slices": told, "worst": worst, "worst_fall": told[worst]["fall_high"] if worst else None}
    )
    for name, row in told.items():
        fall = f"{row['fall']:.3f} [{row['fall_low']:.3f}, {row['fall_high']:.3f}]"
        print(
            f"[capability@{round_}] {name}: {row['sft']:.3f} -> {row['policy']:.3f}, worse by {fall}",
            flush=True,
        )
    if not told:
        print(
            f"[capability@{round_}] nothing in slices/, no capability.tasks: nothing to measure (docs/evaluation.md)",
            flush=True,
        )


if __name__ == "__main__":
    stage_main("capability", main)
