from typing import Any

import pytest

from flows.execution import estimate, machine, memory, memory_check, text_lengths
from flows.execution.model_shape import KNOWN
from stages.lib.core.errors import RondoError
from stages.lib.core.params import Params

MACHINE = machine.Machine(
    device="cpu",
    rates={"float32": 1e11, "bfloat16": 1e12},
    auto="bfloat16",
    memory=8e9,
    total=8e9,
    attention="grouped",
    limits=memory.Limits(piece=1 << 26, cache=1 << 29, tokens=1 << 12),
)
# 30 layers of 576 x 576 (queries, output), 576 x 192 (keys, values) and three 576 x 1536 matrices;
# 49,152 embeddings of 576
WEIGHTS = 134_479_872


def params(**sections: dict[str, object]) -> Params:
    return Params.model_validate(sections)


def test_sft_time_is_four_flops_per_weight_and_token() -> None:
    """10 steps of 16 rows of 96 / 4 tokens (a quarter of max_length), WEIGHTS weights, 4 FLOP each,
    at 0.27 of 1e12 FLOP/s.
    """
    lora = estimate.stage_seconds(
        params(sft={"max_steps": 10, "lora": {"top_layers": None}}), MACHINE
    )
    expected = 10 * 16 * 96 / 4 * WEIGHTS * 4 / 0.27e12
    assert lora["sft"] - estimate.STAGE_SECONDS == pytest.approx(expected, rel=1e-6)
    full = estimate.stage_seconds(params(sft={"max_steps": 10, "lora": {"r": 0}}), MACHINE)
    assert full["sft"] - estimate.STAGE_SECONDS == pytest.approx(1.5 * expected, rel=1e-6)


def test_labels_by_a_judge_take_time_and_human_labels_take_none() -> None:
    """100 prompts, 4 samples each of 6 + 24 tokens by WEIGHTS weights at 2 FLOP and 0.28 of 1e12
    FLOP/s; 12 answers per prompt, 2 per human pair (64), 2 s per answer, 8 at once."""
    section = {"annotator": "judge", "prompts": 100, "samples": 4}
    endpoint = {"base_url": "http://localhost/v1", "model": "wise", "concurrency": 8}
    sampling = 100 * 4 * 30 * WEIGHTS * 2 / 0.28e12
    lexicon = estimate.stage_seconds(params(annotate=section), MACHINE)["annotate"]
    language_model = estimate.stage_seconds(
        params(annotate={**section, "judge": "endpoint", "endpoint": endpoint}), MACHINE
    )["annotate"]
    assert lexicon - estimate.STAGE_SECONDS == pytest.approx(sampling)
    assert language_model - lexicon == pytest.approx((100 * 12 + 128) * 2 / 8)
    assert "annotate" not in estimate.stage_seconds(Params(), MACHINE)
    # 50 revisions: a sample and two answers each; without labels also the 2 * 64 of the human pairs
    revised = {"constitution": "a.txt", "revisions": 50, "judge": "endpoint", "endpoint": endpoint}
    both, revisions = (
        estimate.stage_seconds(params(annotate=section | revised), MACHINE)["annotate"]
        for section in (section, {})
    )
    revising = 50 * 30 * WEIGHTS * 2 / 0.28e12 + 50 * 2 * 2 / 8
    assert both - language_model == pytest.approx(revising)
    assert revisions - estimate.STAGE_SECONDS == pytest.approx(revising + 128 * 2 / 8)


def test_language_models_that_judge_take_time() -> None:
    """10 prompts, 2 samples of base and policy against SFT's, in later rounds of the policy against
    the champion, as it is and at equal KL, and 3 checkpoints with one; 5 badcases of 4 candidates,
    6 matches and 3 comparisons more each. 2 orders, 2 s per answer, 4 at once."""
    endpoint = {"base_url": "http://localhost/v1", "model": "wise", "concurrency": 4}
    sizes: dict[str, Any] = {"prepare": {"max_eval_prompts": 10}}
    sizes["replay"] = {"max_badcases": 5, "policy_pairs": 0}
    automatic = estimate.stage_seconds(params(**sizes), MACHINE)
    by_model = params(**sizes, evaluate={"judges": ["endpoint"]}, annotate={"endpoint": endpoint})
    judged = estimate.stage_seconds(by_model, MACHINE)
    evaluate, replay = (judged[stage] - automatic[stage] for stage in ("evaluate", "replay"))
    assert evaluate == pytest.approx(10 * (2 * 2 + 3) * 2 * 2 / 4)
    later, later_judged = (
        estimate.stage_seconds(one, MACHINE, continues=True) for one in (params(**sizes), by_model)
    )
    assert later_judged["evaluate"] - later["evaluate"] == pytest.approx(10 * (4 * 2 + 3))
    assert later["evaluate"] > automatic["evaluate"]
    assert replay == pytest.approx(5 * (6 + 3) * 2 * 2 / 4)
    # per prompt 4 fresh responses of the policy, and 2 of PPO's 30 updates with 32 episodes on 483
    # prompts: 15 matches, a third of them of texts with about the same length
    sizes["replay"] |= {"policy_pairs": 7}
    compared = estimate.stage_seconds(
        params(**sizes, evaluate={"judges": ["endpoint"]}, annotate={"endpoint": endpoint}), MACHINE
    )["replay"]
    more = compared - estimate.stage_seconds(params(**sizes), MACHINE)["replay"] - replay
    assert more == pytest.approx(7 * 5 * 2 * 2 / 4)
    # as the primary judge: 10 prompts with 4 samples; 96 pairs, and 32 prompts for 3 sizes of
    # best-of-n; 128 prompts, after 15 and 30 updates and for two scaled policies
    for stage, comparisons in {"sft": 10 * 4, "battery": 96 + 32 * 3, "ppo": 128 * 4}.items():
        assert judged[stage] - automatic[stage] == pytest.approx(comparisons * 2 * 2 / 4)
    primary = {"evaluate": {"judges": ["endpoint"]}, "annotate": {"endpoint": endpoint}}
    unscaled = params(**sizes, **primary, ppo={"policy_selection": "best_update"})
    saved = judged["ppo"] - estimate.stage_seconds(unscaled, MACHINE)["ppo"]
    assert saved > 128 * 2 * 2 * 2 / 4  # of the judge, and the samples
    second = {"judges": ["lexicon", "endpoint"]}
    jury = estimate.stage_seconds(
        params(**sizes, evaluate=second, annotate={"endpoint": endpoint}), MACHINE
    )
    assert jury["ppo"] == automatic["ppo"] and jury["evaluate"] == judged["evaluate"]


def test_one_more_sample_per_prompt_and_one_more_epoch_of_pairs_add_their_flops() -> None:
    """Best-of-n: 483 prompts, each sample 6 + 24 tokens at 2 FLOP generated (0.28) and read twice
    (0.7). DPO: 1195 pairs in steps of 16, two texts per pair, at 2 FLOP forward and 2 for the
    adapted half (0.27), read once by the reference."""

    def seconds(**sections: object) -> float:
        return estimate.stage_seconds(params(**sections), MACHINE)["ppo"]

    lora = {"lora": {"top_layers": 15}, "validation_updates": 1000}
    four, five = (seconds(algorithm="best_of_n", best_of_n={"n": n}, ppo=lora) for n in (4, 5))
    assert five - four == pytest.approx(483 * 30 * WEIGHTS * (2 / 0.28 + 4 / 0.7) / 1e12)
    one, two = (
        seconds(algorithm="dpo", dpo={"num_train_epochs": epochs}, ppo=lora) for epochs in (1, 2)
    )
    flops = (149 - 74) * 16 * 2 * 30 * WEIGHTS * (3 / 0.27 + 2 / 0.7)
    assert two - one == pytest.approx(flops / 1e12)
    assert seconds(algorithm="rloo", ppo=lora) > seconds(ppo={**lora, "num_ppo_epochs": 1})


def test_two_scaled_policies_answer_each_validation_prompt_four_times() -> None:
    """128 prompts, each answer 6 + 24 tokens at 2 FLOP generated (0.28) and read twice (0.7)."""
    scaled, unscaled = (
        estimate.stage_seconds(params(ppo={"policy_selection": selection}), MACHINE)["ppo"]
        for selection in ("target_kl", "best_update")
    )
    flops = 2 * 4 * 128 * 30 * WEIGHTS * (2 / 0.28 + 4 / 0.7)
    assert scaled - unscaled == pytest.approx(flops / 1e12)


def test_auto_is_the_dtype_that_the_stages_choose(fast_processes: None) -> None:
    from stages.lib.core.params.shared import Dtype
    from stages.lib.lm.loading import resolve_dtype

    assert f"torch.{machine.measure().auto}" == str(resolve_dtype(Dtype.auto))
    assert machine.dtype_of(params(model={"dtype": "float32"}), MACHINE) == "float32"


def test_the_report_counts_waiting_stages() -> None:
    addresses = ["assets", "sft@r0", "ppo@r0"]
    sizes = {"sft": 2e9, "ppo": 3e9, "evaluate": 7e9}
    all_waiting, one_waiting = (
        estimate.report(Params(), addresses, waiting, 1e9, MACHINE, sizes)
        for waiting in (set(addresses), {"sft@r0"})
    )
    assert "to do: 3 of 3 stages" in all_waiting[1] and "1.0 GB of disk" in all_waiting[2]
    assert "; 3.0 GB of memory" in all_waiting[2]
    assert all_waiting[4:] == ["GB of memory: sft 2.0, ppo 3.0"]
    assert "to do: 1 of 3 stages" in one_waiting[1] and one_waiting[4] == "GB of memory: sft 2.0"
    nothing = estimate.report(Params(), addresses, set(), 0.0, None, None)
    assert nothing == ["to do: nothing; all 3 stages are up to date"]
    # a round whose predecessor has ended continues its SFT model
    first, later = (
        estimate.report(
            params(rounds={"r1": {"previous": previous}}, sft={"num_train_epochs": 1000}),
            ["sft@r1"],
            {"sft@r1"},
            1e9,
            MACHINE,
            sizes,
        )
        for previous in ("assets/start", "rounds/r0")
    )
    assert int(first[2].split()[1]) > 2 * int(later[2].split()[1])  # estimate: N min


def test_the_report_warns_of_memory_that_may_be_missing_and_of_unknown_models() -> None:
    """8 GB are free: 6.6 GB fit with a fifth to spare, 6.7 GB do not."""

    def last_line(sizes: dict[str, float] | None) -> str:
        return estimate.report(Params(), ["sft@r0"], {"sft@r0"}, 1e9, MACHINE, sizes)[-1]

    assert last_line({"sft": 6.6e9}) == "GB of memory: sft 6.6"
    assert last_line({"sft": 6.7e9}) == "warning: sft needs about 6.7 GB of memory, 8.0 GB free"
    assert "assets.model embedded is not known" in last_line(None)


def test_a_stage_that_cannot_fit_is_refused_with_a_change_that_fits() -> None:
    big = params(reward={"per_device_train_batch_size": 32, "max_length": 288})
    big = big.model_copy(update={"assets": big.assets.model_copy(update={"data": "files"})})
    with pytest.raises(RondoError) as refusal:
        estimate.check_memory(big, {"prepare@r0", "prepare@r1", "reward@r0"}, MACHINE)
    message = str(refusal.value)
    assert message.startswith("reward needs about ") and "this machine has 8.0 GB" in message
    change = "reward.per_device_train_batch_size 32 -> 16, with "
    assert change + "reward.gradient_accumulation_steps 1 -> 2" in message
    assert "or reward.gradient_checkpointing false -> true" in message
    assert message.count("gradient_checkpointing") == 1  # both together are not needed

    def needed(**section: object) -> float:
        changed = big.model_copy(update={"reward": big.reward.model_copy(update=section)})
        return estimate.stage_memory(changed, MACHINE, KNOWN["embedded"])["reward"]

    assert needed(per_device_train_batch_size=16) <= 8e9 < needed(per_device_train_batch_size=32)
    assert needed(gradient_checkpointing=True) <= 8e9
    # a stage that is up to date needs no memory
    assert estimate.check_memory(big, {"prepare@r0", "prepare@r1", "sft@r0"}, MACHINE)


def test_what_fits_is_not_refused_by_an_error_of_a_fifth() -> None:
    def measure(_: Params) -> dict[str, float]:
        return {"ppo": 9.5e9}

    memory_check.check(Params(), {"ppo"}, 8e9, measure)
    with pytest.raises(RondoError, match=r"ppo needs about 9\.5 GB .* no smaller batch makes it"):
        memory_check.check(Params(), {"ppo"}, 7.9e9, measure)


def test_fewer_processes_are_advised() -> None:
    def measure(params: Params) -> dict[str, float]:
        return {"ppo": 6e9 * params.processes("ppo")}

    two = params(launcher={"processes": 2})
    with pytest.raises(RondoError, match=r"set launcher\.processes 2 -> 1: 6\.0 GB"):
        memory_check.check(two, {"ppo"}, 8e9, measure)


def test_texts_that_prepare_wrote_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds whose prepare waits have the lengths that the params admit."""
    counts = {
        "demonstrations": [[20]],
        "pairs": [[20, 20]],
        "prompts": [[5]],
        "slices": [],
        "evaluation": 4,
    }
    counted_rounds = []

    def count(round_: str) -> dict[str, object]:
        counted_rounds.append(round_)
        return counts

    monkeypatch.setattr(text_lengths, "count", count)
    files = params(assets={"data": "files"}, prepare={"sources": [{"path": "a.jsonl"}]})
    short = estimate.check_memory(files, {"sft@r0", "prepare@r1"}, MACHINE)
    long = estimate.check_memory(files, {"prepare@r0", "prepare@r1"}, MACHINE)
    assert counted_rounds == ["r0"]
    assert short and long and short["reward"] < long["reward"]


def test_later_rounds_train_the_reward_model_on_replayed_pairs_too():
    """1,195 pairs; 64 + 4 x 48 = 256 more, unless max_share allows fewer: at 0.1, 132."""

    def reward(continues: bool, **replay: object) -> float:
        return estimate.stage_seconds(params(replay=replay), MACHINE, continues)["reward"]

    assert reward(True) / reward(False) == pytest.approx((1195 + 256) / 1195, abs=0.02)
    none = reward(True, max_share=0.0)
    assert none == reward(False)
    more = [reward(True) - none, reward(True, max_share=0.1) - none]
    more.append(reward(True, weight=2, max_share=1.0) - none)
    assert more[1] / more[0] == pytest.approx(132 / 256, rel=0.02)
    assert more[2] / more[0] == pytest.approx(2, rel=0.02)
