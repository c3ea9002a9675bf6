"""The distance of a reward model's weights from SFT's."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.battery.metrics import lineage_distance


@pytest.fixture
def models(tiny_folder):
    sft = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    reward = AutoModelForSequenceClassification.from_pretrained(
        tiny_folder, num_labels=1, dtype=torch.float32
    )
    return reward, sft


def squares(model) -> float:
    return sum(float(weight.square().sum()) for weight in model.base_model.parameters())


def test_the_heads_do_not_count(models):
    reward, sft = models
    assert lineage_distance(reward, sft) == 0
    with torch.no_grad():
        for weight in reward.base_model.parameters():
            weight.mul_(1.1)
    assert lineage_distance(reward, sft) == pytest.approx(0.1, rel=1e-4)


def test_a_weight_of_another_shape_counts_as_missing(models):
    reward, sft = models
    embedding = sft.base_model.embed_tokens.weight
    expected = math.sqrt(float(embedding.square().sum()) / squares(sft))
    reward.resize_token_embeddings(embedding.shape[0] + 8)
    assert lineage_distance(reward, sft) == pytest.approx(expected, rel=1e-6)
