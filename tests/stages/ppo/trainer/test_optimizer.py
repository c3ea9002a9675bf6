"""AdamW with a constant gradient: each of its first steps is the learning rate, whatever the
gradient, so weights are known by hand.
"""

import pytest
import torch

from stages.ppo.trainer.optimizer import MasterWeightOptimizer


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    module = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(module.weight)
    return module


def take_steps(module: torch.nn.Module, optimizer: MasterWeightOptimizer, steps: int) -> None:
    for _ in range(steps):
        module.weight.grad = torch.full_like(module.weight, 0.5)
        optimizer.accumulate_grads()
        optimizer.clip(100.0)
        optimizer.step()


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)])
def test_small_steps_add_up(dtype, rounding):
    """100 steps of 1e-4 from 1; below 1 bfloat16 has steps of 2^-8, above it 2^-7, so that each
    step alone would be rounded away.
    """
    module = make_model(dtype)
    optimizer = MasterWeightOptimizer(module, 1e-4, lambda _: 1.0, 1e-8)
    take_steps(module, optimizer, 100)
    assert optimizer.masters["weight"].tolist() == [[pytest.approx(0.99, abs=1e-5)] * 2]
    assert module.weight.tolist() == [[pytest.approx(0.99, abs=rounding)] * 2]
    assert module.weight.dtype is dtype


def test_gradients_are_clipped_by_their_norm_and_cleared_by_a_step():
    module = make_model(torch.bfloat16)
    optimizer = MasterWeightOptimizer(module, 1e-4, lambda _: 1.0, 1e-8)
    module.weight.grad = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    optimizer.accumulate_grads()
    assert optimizer.clip(1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(optimizer.masters["weight"].grad, torch.tensor([[0.6, 0.8]]))
    optimizer.step()
    assert optimizer.masters["weight"].grad is None and module.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_micro_batches_add_up(dtype):
    """256 + 1 + 1 is 258; in bfloat16, whose steps are 2 there, it would be 256."""
    module = make_model(dtype)
    optimizer = MasterWeightOptimizer(module, 1e-4, lambda _: 1.0, 1e-8)
    for size in (256.0, 1.0, 1.0):
        (module(torch.full((1, 2), size, dtype=dtype))).sum().backward()
        optimizer.accumulate_grads()
    assert optimizer.masters["weight"].grad.tolist() == [[258.0, 258.0]]


def test_resumes_from_its_state():
    uninterrupted, killed, resumed = (make_model(torch.bfloat16) for _ in range(3))
    optimizers = [
        MasterWeightOptimizer(module, 1e-4, lambda _: 1.0, 1e-8)
        for module in (uninterrupted, killed, resumed)
    ]
    take_steps(uninterrupted, optimizers[0], 60)
    take_steps(killed, optimizers[1], 30)
    optimizers[2].load_state(optimizers[1].state())
    torch.testing.assert_close(resumed.weight, killed.weight, rtol=0, atol=0)
    take_steps(resumed, optimizers[2], 30)
    torch.testing.assert_close(
        optimizers[2].masters["weight"], optimizers[0].masters["weight"], rtol=0, atol=0
    )
