"""Texts that are longer than a model can read are refused before SFT starts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.lm.loading import check_model_lengths
from stages.ppo.__main__ import main as ppo
from stages.sft.__main__ import main as sft


def params(prompt: int = 60, response: int = 39, **changes: int) -> Params:
    """`prompt` + `response` + EOS = 100 tokens by default; no other text is longer."""
    return check_params(
        {
            "prepare": {"max_prompt_tokens": prompt},
            "ppo": {"response_length": response},
            "sft": {"max_length": changes.get("sft", 100)},
            "reward": {"max_length": changes.get("reward", 100)},
        },
        "test",
    )


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_positions=100),
        OPTConfig(max_position_embeddings=100),
        LlamaConfig(max_position_embeddings=100),
    ],
    ids=lambda config: config.model_type,
)
def test_texts_longer_than_positions_are_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    check_model_lengths(tmp_path, params())
    for longer, key in (
        (params(prompt=61), r"prepare.max_prompt_tokens \+ ppo.response_length \+ 1 is 101"),
        (params(response=40), r"prepare.max_prompt_tokens \+ ppo.response_length \+ 1 is 101"),
        (params(sft=101), "sft.max_length is 101"),
        (params(reward=101), "reward.max_length is 101"),
    ):
        with pytest.raises(BadInput, match=f"{key} tokens.* 100"):
            check_model_lengths(tmp_path, longer)


def test_a_window_may_be_shorter_than_the_texts(tmp_path: Path) -> None:
    MistralConfig(sliding_window=100).save_pretrained(tmp_path)
    check_model_lengths(tmp_path, params(prompt=500, sft=500, reward=500))


@pytest.mark.parametrize("stage", [sft, ppo])
def test_sft_and_ppo_check_it_first(stage: Any, make_round: Any) -> None:
    long = make_round("r0", 1.0)
    long.ppo.response_length = 512  # the tiny model has 512 positions
    with pytest.raises(BadInput, match=r"ppo\.response_length"):
        stage(long, "r0")
