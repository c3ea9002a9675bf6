"""OpenRLHF's formulas, from its wheel, against Rondo's: the settings that docs/engines.md maps to
each other mean the same.
"""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union
from zipfile import ZipFile

import pytest
import torch

from stages.ppo.trainer import functional

WHEEL = os.environ.get("OPENRLHF_WHEEL", "")
pytestmark = pytest.mark.skipif(
    not WHEEL, reason="needs OpenRLHF's wheel: make test-engines downloads it"
)
GAMMA, LAM, CLIP, KL_COEF = 0.97, 0.9, 0.2, 0.3


@pytest.fixture(scope="module")
def openrlhf() -> SimpleNamespace:
    """The functions and classes by name; their files import DeepSpeed and Ray, which are left
    out.
    """
    sources = ("models/utils.py", "models/loss.py", "trainer/ppo_utils/experience_maker.py")
    with ZipFile(WHEEL) as archive:
        names = {name.split("openrlhf/")[-1]: name for name in archive.namelist()}
        texts = [archive.read(names[source]).decode() for source in sources]
    wanted = {"masked_mean", "compute_approx_kl", "compute_reward", "aggregate_loss"}
    wanted |= {"PolicyLoss", "ValueLoss", "get_advantages_and_returns"}
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    definitions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))
    known = [node for node in definitions if node.name in wanted]
    space: dict[str, Any] = {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "Optional": Optional,
        "Tuple": tuple,
        "List": list,
        "Union": Union,
    }
    code = ast.fix_missing_locations(ast.Module(known, []))
    exec(compile(code, Path(WHEEL).name, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in wanted})


@pytest.fixture
def rollout() -> SimpleNamespace:
    """Three episodes of 5, 3 and 1 tokens; padding has other numbers, which must not count."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    names = ("logprobs", "old", "reference", "values", "old_values")
    return SimpleNamespace(
        mask=mask, scores=torch.tensor([7.0, -0.5, -6.0]), **{n: torch.randn(3, 5) for n in names}
    )


def advantages_of(openrlhf, rollout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Advantages and returns of both, on the tokens, with scores clipped to +-5."""
    kl = openrlhf.compute_approx_kl(rollout.old, rollout.reference, kl_estimator="k1")
    reward = openrlhf.compute_reward(
        rollout.scores, KL_COEF, kl, rollout.mask, reward_clip_range=(-5.0, 5.0)
    )
    other = openrlhf.get_advantages_and_returns(
        None, rollout.values, reward, rollout.mask, GAMMA, LAM
    )
    rewards = functional.token_rewards(
        rollout.scores.clamp(-5.0, 5.0), rollout.old, rollout.reference, rollout.mask, KL_COEF
    )
    own = functional.gae(rewards, rollout.values, rollout.mask, GAMMA, LAM)
    return [tuple(values[rollout.mask] for values in both) for both in (other, own)]


def test_rewards_kl_and_advantages(openrlhf, rollout):
    (advantages, returns), (own_advantages, own_returns) = advantages_of(openrlhf, rollout)
    torch.testing.assert_close(own_advantages, advantages)
    torch.testing.assert_close(own_returns, returns)


def test_policy_loss_and_the_share_of_clipped_tokens(openrlhf, rollout):
    advantages = torch.randn(3, 5)
    loss, clipped, *_ = openrlhf.PolicyLoss(CLIP, CLIP)(
        rollout.logprobs, rollout.old, advantages, rollout.mask
    )
    own, own_clipped = functional.policy_loss(
        rollout.logprobs, rollout.old, advantages, functional.Clip(CLIP, CLIP)
    )
    torch.testing.assert_close(functional.masked_mean(own, rollout.mask), loss)
    share = functional.masked_mean(own_clipped.float(), rollout.mask)
    torch.testing.assert_close(share, clipped)
    assert 0 < float(share) < 1


def test_value_loss(openrlhf, rollout):
    returns = torch.randn(3, 5)
    loss = openrlhf.ValueLoss(CLIP)(rollout.values, rollout.old_values, returns, rollout.mask)
    own, _ = functional.value_loss(rollout.values, rollout.old_values, returns, CLIP)
    torch.testing.assert_close(functional.masked_mean(own, rollout.mask), loss)
