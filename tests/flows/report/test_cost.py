"""The cost of a round, against numbers worked out by hand."""

from pathlib import Path
from typing import Any

import yaml

from flows.core.locks import read_locks
from flows.execution.meter import Meter
from flows.report import cost, page
from flows.report.round_data import read_round
from flows.tracking import provenance
from stages.lib.core.files import stage_dir, work_dir, write_json, write_jsonl, write_text
from tests.flows.report.reading import Page, all_ran


def lock(settings: dict[str, dict[str, Any]]) -> None:
    """Write a dvc.lock in which stages of r0 ran with these settings."""
    stages = {
        f"{name}@r0": {"params": {"params.yaml": {name: values}}, "outs": []}
        for name, values in settings.items()
    }
    write_text(Path("dvc.lock"), yaml.safe_dump({"stages": stages}))


def metrics(stage: str, values: dict[str, Any]) -> None:
    write_json(stage_dir("r0", stage) / "metrics.json", values)


def rows() -> dict[str, cost.CostRow]:
    results = read_round("r0", all_ran("r0") | read_locks())
    return {row.title: row for row in cost.cost_rows(results)}


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
    costs = rows()
    # 42 steps of 16 rows are 0.7226 of 930 rows, whose tokens are 19385: 14007
    trained_on = costs["tokens trained on"]
    assert trained_on.cell("sft") == trained_on.total == "about 14,000"
    # 64 episodes of about 9 tokens
    generated = costs["tokens generated"]
    assert generated.cell("ppo") == "about 580"
    # 100 prompts: 2 samples of 20, 10 and 12 tokens by the models, 1 of 11 by step_00010;
    # step_00020 is the policy itself
    assert generated.cell("evaluate") == "9,500"
    assert generated.total == "about 10,000"
    assert generated.cell("replay") == "-"
    # with curves the length of each update is known: 32 episodes of 8, 32 of 12.5
    write_text(stage_dir("r0", "ppo") / "curves.csv", "step,response_length\n1,8\n2,12.5\n")
    generated = rows()["tokens generated"]
    assert (generated.cell("ppo"), generated.total) == ("656", "10,156")
    # scaled, the policy has other weights than step_00020, which then writes 12 tokens per prompt
    metrics(
        "ppo", {"episodes": 64, "response_length": 9.0, "policy_update": 20, "policy_scale": 0.9}
    )
    assert rows()["tokens generated"].cell("evaluate") == "10,700"
    # a later round also writes 2 samples of 13 and 11 tokens by the champion and at equal KL
    later = {"champion": {"length": 13.0}, "equal_kl": {"length": 11.0}}
    metrics("evaluate", {**models, **later, "prompts": 100})
    assert rows()["tokens generated"].cell("evaluate") == "13,200"


def test_usage_of_judges_is_summed(project: Path) -> None:
    judge = {"tokens_in": 900, "tokens_out": 30, "cost": 0.5}
    revisions = {"prompts": 8, "tokens_in": 50, "tokens_out": 5, "cost": 0.25}
    metrics("annotate", {**judge, "revisions": revisions})
    other = {"tokens_in": 100, "tokens_out": 1, "cost": None}
    jury = {"lexicon": {"kappa": 1.0}, "a": judge, "b": other}
    metrics("evaluate", {"jury": {"alone": jury}})
    costs = rows()
    tokens_in = costs["judges: input tokens"]
    assert [tokens_in.cell(stage) for stage in ("annotate", "evaluate", "replay")] == [
        *("950", "1,000", "-")
    ]
    assert (costs["judges: output tokens"].total, costs["judges: price"].total) == ("66", "1.25")


def test_minutes_of_the_run_that_made_it(project: Path) -> None:
    lock({"sft": {}, "ppo": {}})
    for address, seconds in (("sft@r0", 90.0), ("ppo@r0", 600.0)):
        with Meter() as meter:
            pass
        meter.seconds = seconds
        provenance.record_provenance(address, provenance.RunRef("run", "none"), None, meter)
    times = [{"step": -1, "time": 1000.0}, {"step": 1, "time": 1120.0}]
    # a stage without a provenance record
    write_jsonl(work_dir("r0", "reward") / "clock.jsonl", times)
    write_jsonl(work_dir("r0", "ppo") / "clock.jsonl", times)
    minutes = rows()["minutes"]
    assert [minutes.cell(stage) for stage in ("sft", "reward", "ppo")] == ["1.5", "2", "10"]
    assert minutes.cell("replay") == "-"
    assert minutes.total == "13.5"

    back = [{"step": -1, "time": 1000.0}, {"step": 1, "time": 880.0}]  # the clock was set back
    write_jsonl(work_dir("r0", "reward") / "clock.jsonl", back)
    assert rows()["minutes"].cell("reward") == "-"


def test_an_amount_that_no_file_contains_is_unknown(project: Path) -> None:
    assert {row.total for row in rows().values()} == {"-"}
    metrics("ppo", {"policy_update": 3})  # DPO has no episodes
    # without dvc.lock the batch size is unknown
    metrics("sft", {"train_rows": 4, "train_tokens": 9, "steps": 1})
    assert {row.total for row in rows().values()} == {"-"}
    words = Page(page.write(["r0"], all_ran("r0")).read_text()).words
    assert "r0: minutes" in words and "r0: judges: price" not in words
