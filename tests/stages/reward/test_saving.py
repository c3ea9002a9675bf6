import math
from types import SimpleNamespace

import pytest
import torch

from stages.lib.core.errors import RondoError
from stages.reward.saving import set_calibration


def test_calibration_is_the_mean_and_the_standard_deviation_of_a_sample() -> None:
    model = set_calibration(SimpleNamespace(config=SimpleNamespace()), torch.tensor([1.0, 3.0]))
    assert (model.config.mean, model.config.std) == (2.0, pytest.approx(math.sqrt(2)))


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_scores_that_are_equal_or_not_finite_are_a_diverged_model(scores: list[float]) -> None:
    model = SimpleNamespace(config=SimpleNamespace())
    with pytest.raises(RondoError, match=r"diverged: .* 2 held-out .*; lower reward\.learning"):
        set_calibration(model, torch.tensor(scores))
