from typing import Any

import pytest

from flows.execution import estimate
from stages.lib.core.params import Params

MACHINE = estimate.Machine(
    device="cpu", rates={"float32": 1e11, "bfloat16": 1e12}, auto="bfloat16", memory=8e9
)


def params(**sections: dict[str, object]) -> Params:
    return Params.model_validate(sections)


def test_sft_time_is_four_flops_per_weight_and_token() -> None:
    """10 steps of 16 rows of 96 / 4 tokens (a quarter of max_length), 135e6 weights, 4 FLOP each,
    at 0.27 of 1e12 FLOP/s.
    """
    lora = estimate.estimate(params(sft={"max_steps": 10, "lora": {"top_layers": None}}), MACHINE)
    expected = 10 * 16 * 96 / 4 * 135e6 * 4 / 0.27e12
    assert lora.seconds["sft"] - estimate.STAGE_SECONDS == pytest.approx(expected, rel=1e-6)
    full = estimate.estimate(params(sft={"max_steps": 10, "lora": {"r": 0}}), MACHINE)
    assert full.seconds["sft"] - estimate.STAGE_SECONDS == pytest.approx(1.5 * expected, rel=1e-6)


def test_labels_by_a_judge_take_time_and_human_labels_take_none() -> None:
    """100 prompts, 4 samples each of 6 + 24 tokens by 135e6 weights at 2 FLOP and 0.28 of 1e12
    FLOP/s; 12 answers per prompt, 2 per human pair (64), 2 s per answer, 8 at once."""
    section = {"annotator": "judge", "prompts": 100, "samples": 4}
    endpoint = {"base_url": "http://localhost/v1", "model": "wise", "concurrency": 8}
    sampling = 100 * 4 * 30 * 135e6 * 2 / 0.28e12
    lexicon = estimate.estimate(params(annotate=section), MACHINE).seconds["annotate"]
    language_model = estimate.estimate(
        params(annotate={**section, "judge": "endpoint", "endpoint": endpoint}), MACHINE
    ).seconds["annotate"]
    assert lexicon - estimate.STAGE_SECONDS == pytest.approx(sampling)
    assert language_model - lexicon == pytest.approx((100 * 12 + 128) * 2 / 8)
    assert "annotate" not in estimate.estimate(Params(), MACHINE).seconds
    # 50 revisions: a sample and two answers each; without labels also the 2 * 64 of the human pairs
    revised = {"constitution": "a.txt", "revisions": 50, "judge": "endpoint", "endpoint": endpoint}
    both, revisions = (
        estimate.estimate(params(annotate=section | revised), MACHINE).seconds["annotate"]
        for section in (section, {})
    )
    revising = 50 * 30 * 135e6 * 2 / 0.28e12 + 50 * 2 * 2 / 8
    assert both - language_model == pytest.approx(revising)
    assert revisions - estimate.STAGE_SECONDS == pytest.approx(revising + 128 * 2 / 8)


def test_language_models_that_judge_take_time() -> None:
    """10 prompts, 2 samples of base, policy and champion against SFT's, 2 checkpoints with one; 5
    badcases of 4 candidates, 6 matches and 3 comparisons more each. 2 orders, 2 s per answer, 4 at
    once."""
    endpoint = {"base_url": "http://localhost/v1", "model": "wise", "concurrency": 4}
    sizes: dict[str, Any] = {"prepare": {"max_eval_prompts": 10}, "replay": {"max_badcases": 5}}
    automatic = estimate.estimate(params(**sizes), MACHINE).seconds
    judged = estimate.estimate(
        params(**sizes, evaluate={"judges": ["endpoint"]}, annotate={"endpoint": endpoint}), MACHINE
    ).seconds
    evaluate, replay = (judged[stage] - automatic[stage] for stage in ("evaluate", "replay"))
    assert evaluate == pytest.approx(10 * (3 * 2 + 2) * 2 * 2 / 4)
    assert replay == pytest.approx(5 * (6 + 3) * 2 * 2 / 4)
    # as the primary judge: 10 prompts with 4 samples; 96 pairs, and 32 prompts for 3 sizes of
    # best-of-n; 64 prompts, 5 times in 20 updates
    for stage, comparisons in {"sft": 10 * 4, "battery": 96 + 32 * 3, "ppo": 64 * 5}.items():
        assert judged[stage] - automatic[stage] == pytest.approx(comparisons * 2 * 2 / 4)
    second = {"judges": ["lexicon", "endpoint"]}
    jury = estimate.estimate(
        params(**sizes, evaluate=second, annotate={"endpoint": endpoint}), MACHINE
    ).seconds
    assert jury["ppo"] == automatic["ppo"] and jury["evaluate"] == judged["evaluate"]


def test_one_more_sample_per_prompt_and_one_more_epoch_of_pairs_add_their_flops() -> None:
    """Best-of-n: 483 prompts, each sample 6 + 24 tokens at 2 FLOP generated (0.28) and read twice
    (0.7). DPO: 1195 pairs in steps of 16, two texts per pair, at 2 FLOP forward and 2 for the
    adapted half (0.27), read once by the reference."""

    def seconds(**sections: object) -> float:
        return estimate.estimate(params(**sections), MACHINE).seconds["ppo"]

    lora = {"lora": {"top_layers": 15}, "validation_updates": 1000}
    four, five = (seconds(algorithm="best_of_n", best_of_n={"n": n}, ppo=lora) for n in (4, 5))
    assert five - four == pytest.approx(483 * 30 * 135e6 * (2 / 0.28 + 4 / 0.7) / 1e12)
    one, two = (
        seconds(algorithm="dpo", dpo={"num_train_epochs": epochs}, ppo=lora) for epochs in (1, 2)
    )
    flops = (149 - 74) * 16 * 2 * 30 * 135e6 * (3 / 0.27 + 2 / 0.7)
    assert two - one == pytest.approx(flops / 1e12)
    assert seconds(algorithm="rloo", ppo=lora) > seconds(ppo={**lora, "num_ppo_epochs": 1})


def test_auto_is_the_dtype_that_the_stages_choose(fast_processes: None) -> None:
    from stages.lib.core.params.shared import Dtype
    from stages.lib.lm.loading import resolve_dtype

    assert f"torch.{estimate.measure().auto}" == str(resolve_dtype(Dtype.auto))
    assert estimate.dtype_of(params(model={"dtype": "float32"}), MACHINE) == "float32"


def test_the_report_counts_waiting_stages_and_memory_grows_with_the_model(
    fast_processes: None,
) -> None:
    addresses = ["assets", "sft@r0", "ppo@r0"]
    all_waiting, one_waiting = (
        estimate.report(Params(), addresses, waiting, 1e9)
        for waiting in (set(addresses), {"sft@r0"})
    )
    assert "to do: 3 of 3 stages" in all_waiting[1] and "1.0 GB of disk" in all_waiting[2]
    assert "to do: 1 of 3 stages" in one_waiting[1]
    nothing = estimate.report(Params(), addresses, set(), 0.0)
    assert nothing == ["to do: nothing; all 3 stages are up to date"]
    # a round whose predecessor has ended continues its SFT model
    first, later = (
        estimate.report(
            params(rounds={"r1": {"previous": previous}}, sft={"num_train_epochs": 1000}),
            ["sft@r1"],
            {"sft@r1"},
            1e9,
        )
        for previous in ("assets/start", "rounds/r0")
    )
    assert int(first[2].split()[1]) > 2 * int(later[2].split()[1])  # estimate: N min
    big = params(assets={"model": "Qwen/Qwen2.5-0.5B-Instruct"}, model={"dtype": "float32"})
    assert estimate.estimate(big, MACHINE).memory == pytest.approx(3 * 494e6 * 4 + 2.8e9)
    full = params(ppo={"lora": {"r": 0}, "critic_lora": {"r": 0}})
    assert estimate.estimate(full, MACHINE).memory == pytest.approx(2 * 20 * 135e6 + 2.8e9)
