"""The reward model's scores as PPO reads them."""

import pytest
import torch

from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.loading import attach_ensemble
from stages.lib.lm.packing import pack
from stages.lib.lm.scoring import member_scores, reward_scores
from stages.ppo.trainer.roles import Roles

PROMPTS, RESPONSES = [[5, 6], [7], [8, 9, 10]], [[11, 2], [12, 13, 14, 2], [2]]
WHOLE = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("related", [False, True])
def test_ppo_is_rewarded_by_the_whole_ensemble(make_roles, tiny_reward_model, value_head, related):
    """`related`: the first member shares a layer with the policy, the second does not, so all
    models have none in common.
    """
    roles = make_roles(lora=LoraParams(r=4), value_head=value_head, related=related)
    reward_model = roles.reward_model or roles.critic.get_base_model()
    reward_model.config.ensemble_reduce = "mean"
    reward_model.config.ensemble_mean, reward_model.config.ensemble_std = 0.0, 1.0
    first_scores = member_scores(reward_model, WHOLE).tolist()
    second = tiny_reward_model(5)
    attach_ensemble(reward_model, [second])
    roles = Roles(  # counts the layers that all models share
        roles.policy, roles.critic, roles.tokenizer, reward_model=roles.reward_model
    )
    packed = pack(PROMPTS, RESPONSES, torch.device("cpu"))
    scores, _ = roles.raw_scores(packed, roles.run_reference(packed)[2])
    # both are calibrated by mean 0 and standard deviation 1
    expected = [
        (score + second(torch.tensor([ids])).logits.item()) / 2
        for score, ids in zip(first_scores, WHOLE, strict=True)
    ]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert reward_scores(reward_model, WHOLE).tolist() == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(first_scores, abs=1e-3)
