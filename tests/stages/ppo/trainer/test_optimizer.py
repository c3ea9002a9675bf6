"""AdamW's first steps are known by hand: with a constant gradient each is the learning rate,
whatever the gradient.
"""

import pytest
import torch

from stages.ppo.trainer.optimizer import MasterWeightOptimizer


def model(dtype: torch.dtype) -> torch.nn.Module:
    module = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(module.weight)
    return module


def walk(module: torch.nn.Module, learner: MasterWeightOptimizer, steps: int) -> None:
    for _ in range(steps):
        module.weight.grad = torch.full_like(module.weight, 0.5)
        learner.accumulate_grads()
        learner.clip(100.0)
        learner.step()


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)])
def test_small_steps_add_up(dtype, near):
    """100 steps of 1e-4 from 1; below 1 bfloat16 has steps of 2^-8, above it 2^-7, so that each
    step alone would be rounded away.
    """
    module = model(dtype)
    learner = MasterWeightOptimizer(module, 1e-4, lambda _: 1.0)
    walk(module, learner, 100)
    assert learner.masters["weight"].tolist() == [[pytest.approx(0.99, abs=1e-5)] * 2]
    assert (
        module.weight.tolist() == [[pytest.approx(0.99, abs=near)] * 2]
        and module.weight.dtype is dtype
    )


def test_gradients_are_clipped_to_their_norm_and_then_gone():
    module = model(torch.bfloat16)
    learner = MasterWeightOptimizer(module, 1e-4, lambda _: 1.0)
    module.weight.grad = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    learner.accumulate_grads()
    assert learner.clip(1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(learner.masters["weight"].grad, torch.tensor([[0.6, 0.8]]))
    learner.step()
    assert learner.masters["weight"].grad is None and module.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_micro_batches_add_up(dtype):
    """256 + 1 + 1 is 258; in bfloat16, whose steps are 2 there, it would be 256."""
    module = model(dtype)
    learner = MasterWeightOptimizer(module, 1e-4, lambda _: 1.0)
    for size in (256.0, 1.0, 1.0):
        (module(torch.full((1, 2), size, dtype=dtype))).sum().backward()
        learner.accumulate_grads()
    assert learner.masters["weight"].grad.tolist() == [[258.0, 258.0]]


def test_goes_on_from_its_state():
    whole, first = model(torch.bfloat16), model(torch.bfloat16)
    walk(whole, learner := MasterWeightOptimizer(whole, 1e-4, lambda _: 1.0), 60)
    walk(first, began := MasterWeightOptimizer(first, 1e-4, lambda _: 1.0), 30)
    second = model(torch.bfloat16)
    resumed = MasterWeightOptimizer(second, 1e-4, lambda _: 1.0)
    resumed.load_state(began.state())
    torch.testing.assert_close(second.weight, first.weight, rtol=0, atol=0)
    walk(second, resumed, 30)
    torch.testing.assert_close(resumed.masters["weight"], learner.masters["weight"], rtol=0, atol=0)
