"""What a round has cost, by numbers that were worked out by hand."""

from pathlib import Path
from typing import Any

import yaml

from flows.execution.energy import Counter, Meter
from flows.report import cost, page
from flows.report.round_data import read_round
from flows.tracking import provenance
from flows.tracking.records import read_locks
from stages.lib.core.files import stage_dir, work_dir, write_json, write_jsonl, write_text
from tests.flows.report.reading import Page


def lock(settings: dict[str, dict[str, Any]]) -> None:
    """dvc.lock, in which stages of r0 have run with these settings."""
    stages = {
        f"{name}@r0": {"params": {"params.yaml": {name: values}}, "outs": []}
        for name, values in settings.items()
    }
    write_text(Path("dvc.lock"), yaml.safe_dump({"stages": stages}))


def metrics(stage: str, values: dict[str, Any]) -> None:
    write_json(stage_dir("r0", stage) / "metrics.json", values)


def told() -> dict[str, cost.Line]:
    return {line.title: line for line in cost.lines(read_round("r0", read_locks()))}


def test_tokens_of_training_and_writing(project: Path) -> None:
    sft = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 0.7,
    }
    lock({"sft": sft, "evaluate": {"samples_per_prompt": 2, "checkpoint_samples_per_prompt": 1}})
    metrics("sft", {"train_rows": 930, "train_tokens": 19385, "steps": 42})
    metrics("ppo", {"episodes": 64, "response_length": 9.0, "policy_update": 20})
    models = {
        name: {"length": length} for name, length in (("base", 20.0), ("sft", 10.0), ("ppo", 12.0))
    }
    metrics(
        "evaluate",
        {
            **models,
            "checkpoints": {"step_00010": {"length": 11.0}, "step_00020": {"length": 12.0}},
            "prompts": 100,
        },
    )
    found = told()
    # 42 steps of 16 rows are 0.7226 of 930 rows, whose tokens are 19385: 14007
    assert (
        found["tokens trained on"].cell("sft") == found["tokens trained on"].total == "about 14,000"
    )
    # 64 episodes of about 9; 100 prompts twice by three models, once by the checkpoint that is not
    # the policy
    assert found["tokens written"].cell("ppo") == "about 580"
    assert found["tokens written"].cell("evaluate") == "9,500"
    assert found["tokens written"].total == "about 10,000"
    assert found["tokens written"].cell("replay") == "-"
    # the curve has the length of every update: 32 episodes of 8, 32 of 12.5
    write_text(stage_dir("r0", "ppo") / "curves.csv", "step,response_length\n1,8\n2,12.5\n")
    assert (
        told()["tokens written"].cell("ppo") == "656" and told()["tokens written"].total == "10,156"
    )


def test_what_judges_counted(project: Path) -> None:
    judge = {"tokens_in": 900, "tokens_out": 30, "cost": 0.5}
    metrics("annotate", judge)
    metrics(
        "evaluate",
        {
            "jury": {
                "alone": {
                    "lexicon": {"kappa": 1.0},
                    "a": judge,
                    "b": {"tokens_in": 100, "tokens_out": 1, "cost": None},
                }
            }
        },
    )
    found = told()
    assert [
        found["judges: tokens read"].cell(stage) for stage in ("annotate", "evaluate", "replay")
    ] == ["900", "1,000", "-"]
    assert (found["judges: tokens written"].total, found["judges: price"].total) == ("61", "1")


def test_minutes_and_energy_of_the_run_that_made_it(project: Path) -> None:
    lock({"sft": {}, "ppo": {}})
    for address, seconds in (("sft@r0", 90.0), ("ppo@r0", 600.0)):
        with Meter([]) as meter:
            pass
        meter.seconds = seconds
        provenance.record_provenance(address, provenance.RunRef("run", "none"), None, meter)
    times = [{"step": -1, "time": 1000.0}, {"step": 1, "time": 1120.0}]
    write_jsonl(
        work_dir("r0", "reward") / "clock.jsonl", times
    )  # of an older version, which took no notes
    write_jsonl(work_dir("r0", "ppo") / "clock.jsonl", times)
    minutes, energy = told()["minutes"], told()["watt-hours"]
    assert [minutes.cell(stage) for stage in ("sft", "reward", "ppo", "replay")] == [
        "1.5",
        "2",
        "10",
        "-",
    ]
    assert minutes.total == "13.5"
    assert (energy.cell("ppo"), energy.total) == ("-", "not readable")

    counter = project / "package"
    write_text(counter / "max_energy_range_uj", "99000000000")
    write_text(counter / "energy_uj", "0")
    with Meter([Counter(counter)]) as meter:
        write_text(counter / "energy_uj", "5400000000")
    provenance.record_provenance("ppo@r0", provenance.RunRef("run", "none"), None, meter)
    energy = told()["watt-hours"]
    assert (energy.cell("sft"), energy.cell("ppo"), energy.total) == ("-", "1.5", "1.5")


def test_nothing_is_made_up(project: Path) -> None:
    assert {line.total for line in told().values()} == {"-"}
    metrics("ppo", {"policy_update": 3})  # of DPO, which has no episodes
    metrics(
        "sft", {"train_rows": 4, "train_tokens": 9, "steps": 1}
    )  # without a lock there is no size of a batch
    assert {line.total for line in told().values()} == {"-"}
    words = Page(page.write(["r0"]).read_text()).words
    assert "r0: minutes" in words and "r0: judges: price" not in words
