"""Rounding in bfloat16: what is below it counts as no movement, and is no clip range."""

from statistics import fmean

import pytest
import torch

from stages.lib.core.errors import BadInput
from stages.lib.core.params.policy import PolicySelection, PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.responses import Response, score_responses
from stages.lib.lm.scoring import rounding_differences
from stages.ppo.common.health import (
    DANGER,
    WARN,
    MetricHistory,
    Monitor,
    Rounding,
    clips_nothing,
    no_movement,
)
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.trainer.loop import check_clip_range
from stages.ppo.trainer.update import PpoTrainer

PROMPTS = [[5 + i % 7, 6, 7][: 1 + i % 3] for i in range(16)]
LIKES_ALL = PrimaryJudge("mine", PointwiseJudge("mine", lambda _, texts: [0.0] * len(texts), 0.0))


@pytest.fixture
def in_dtype(make_roles):
    """Roles whose policy has logits up to about 20, as a language model."""

    def make(dtype):
        roles = make_roles(lora=LoraParams(r=4))
        inner = roles.policy.get_base_model()
        with torch.no_grad():
            inner.get_output_embeddings().weight.mul_(4)
            for name, parameter in roles.policy.named_parameters():
                if "lora_" not in name:
                    parameter.data = parameter.data.to(dtype)
        inner.config.dtype = dtype
        return roles

    return make


def steps_of(roles, learning_rate):
    """The monitor, with what rounding gives, and the metrics of four updates."""
    ppo = PpoParams(
        batch_size=16,
        mini_batch_size=16,
        micro_batch_size=16,
        response_length=6,
        total_episodes=64,
        kl_patience=4,
        learning_rate=learning_rate,
        max_kl_per_token=1e3,
        policy_selection=PolicySelection.best_update,
    )
    episodes = [({"id": str(i), "prompt": str(i)}, ids) for i, ids in enumerate(PROMPTS)]
    selector = PolicySelector(roles, episodes, LIKES_ALL, ppo, seed=0)
    selector.validate(0)
    trainer, monitor = PpoTrainer(roles, episodes, ppo, seed=0), Monitor(ppo)
    trainer.sft_length = selector.first.length
    monitor.rounding = selector.rounding
    return monitor, [{"step": update, **trainer.step()[1]} for update in range(1, 5)]


@pytest.mark.parametrize(
    ("dtype", "rate", "signs"),
    [
        (torch.float32, 1e-7, ["no movement"]),
        (torch.bfloat16, 1e-5, ["no movement"]),
        (torch.bfloat16, 1e-2, []),
    ],
)
def test_a_run_that_does_not_move_is_reported_in_each_dtype(in_dtype, dtype, rate, signs):
    monitor, steps = steps_of(in_dtype(dtype), rate)
    assert [finding.sign for finding in monitor.check(steps)] == signs
    if dtype is torch.bfloat16:  # rounding alone passes the threshold of params.yaml
        assert max(step["kl_per_token"] for step in steps) > monitor.params.min_kl_per_token


def test_rounding_is_what_negligible_adapters_give(in_dtype, shift):
    """Adapters of 1e-4: in float32 they give less than 1e-4 nats per token. In bfloat16 they give
    several times as much, since logits are rounded; the measured rounding is at most 5 times that.
    In float32, which has 65,536 times as many numbers, it is nearly 0.
    """
    ends, responses = EndTokens(2), [[9 + i % 5, 11, 12, 2] for i in range(len(PROMPTS))]

    def measured(dtype):
        roles = in_dtype(dtype)
        kl, rows = rounding_differences(
            roles.policy, PROMPTS, responses, ends=ends, temperature=1.0
        )
        assert [len(row) for row in rows] == [4] * len(PROMPTS)
        shift(roles.policy, 1e-4)
        sampled = [Response(*ids, "", True) for ids in zip(PROMPTS, responses, strict=True)]
        scored = score_responses(
            sampled, roles.policy, roles.reference, roles.tokenizer, temperature=1.0
        )
        return kl, fmean(response.kl for response in scored) / 4

    rounding, adapters = measured(torch.float32)
    assert abs(rounding) < 1e-6 and 0 < adapters < 1e-4
    rounding, adapters = measured(torch.bfloat16)
    assert 3e-4 < adapters < rounding < 5 * adapters


@pytest.mark.parametrize(
    ("kl", "least", "rounding", "danger"),
    [
        (0.0015, 0.0005, 0.001, True),  # below twice the rounding
        (0.0021, 0.0005, 0.001, False),
        (0.0004, 0.0005, 0.0001, True),  # the threshold of params.yaml is the larger one
        (0.0006, 0.0005, 0.0001, False),
        (0.0, 0.0, 0.001, False),  # switched off
    ],
)
def test_movement_counts_from_twice_what_rounding_gives(kl, least, rounding, danger):
    params = PpoParams(min_kl_per_token=least, kl_patience=3)
    history = MetricHistory([{"kl_per_token": kl}] * 3, Rounding(kl_per_token=rounding))
    assert no_movement(history, params) == (DANGER if danger else "", kl)


@pytest.mark.parametrize(("fraction", "warns"), [(0.003, True), (0.006, False)])
def test_what_rounding_clips_is_no_clipping(fraction, warns):
    history = MetricHistory([{"clip_fraction": fraction}] * 10, Rounding(clip_fraction=0.005))
    assert clips_nothing(history, PpoParams()) == (WARN if warns else "", fraction)


def test_a_clip_range_per_sequence_below_rounding_is_refused():
    """Log-ratios of 0.01 by rounding alone: 0.02 is twice as much."""
    rounding = Rounding(sequence_log_ratio=0.01)
    check_clip_range(PpoParams(), rounding)  # per token
    check_clip_range(PpoParams(loss_level="sequence", cliprange_sequence=0.02), rounding)
    check_clip_range(PpoParams(loss_level="sequence"), Rounding(sequence_log_ratio=1e-6))
    words = (
        r"ppo\.cliprange_sequence 0\.0004.*set model\.dtype to float32, ppo\.loss_level.* 0\.02 or"
    )
    with pytest.raises(BadInput, match=words):
        check_clip_range(PpoParams(loss_level="sequence"), rounding)
