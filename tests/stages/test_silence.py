"""Stages with a line due at each item: counting, log-probabilities, sampling, training and requests
say what they do. The other passes: lib/core/test_progress.py, lib/lm/test_packing.py.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.annotate.__main__ import main as annotate
from stages.assets.inputs import main as inputs
from stages.lib.core.params import Params, check_params
from stages.lib.core.progress import PROGRESS, reporting
from stages.sft.__main__ import main as sft

Stage = Callable[[Params, str], None]


def passes(stage: Stage, params: Params) -> set[str]:
    """What the lines of a stage name, with the passes around; without their counts."""
    lines: list[str] = []
    with reporting("stage@r0", lines.append, quiet=0.0):
        stage(params, "r0")
    matches = [PROGRESS.match(line) for line in lines]
    assert None not in matches
    return {
        re.sub(r" \d+/\d+ [\w-]+", "", "  ".join(filter(None, (match["what"], match["details"]))))
        for match in matches
        if match
    }


@pytest.fixture
def small_round(make_round: Any) -> Params:
    """A round on disk, before SFT, and settings with which SFT takes seconds."""
    values = make_round("r0", 1.0).model_dump(mode="json")
    values["sft"] |= {"max_steps": 1, "samples_per_prompt": 1}
    params = check_params(values, "test")
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    inputs(params, "r0")
    return params


def test_each_long_pass_of_sft_says_what_it_does(small_round: Params) -> None:
    assert passes(sft, small_round) >= {
        "counting tokens",
        "log-probabilities  base model",
        "sampling  base model",
        "training",
        "log-probabilities  SFT model",
        "sampling  SFT model",
        "hashing rounds/r0/sft/model/model.safetensors",
    }


def test_requests_to_a_language_model_are_counted(small_round: Params, chat_server: Any) -> None:
    endpoint = {"base_url": chat_server.url, "model": "wise", "max_retries": 0}
    endpoint["rubric"] = "Be fair."
    values = small_round.model_dump(mode="json")
    values["annotate"] |= {"annotator": "judge", "judge": "endpoint", "prompts": 2, "samples": 2}
    values["annotate"]["endpoint"] |= endpoint
    chat_server.answer = lambda _: '{"reason": "so", "preference": "A"}'
    params = check_params(values, "test")
    lines: list[str] = []
    with reporting("annotate@r0", lines.append, 0.0), pytest.raises(Exception, match="no response"):
        annotate(params, "r0")
    assert any(line.startswith("[annotate@r0] asking wise 1/") for line in lines)
    assert any(line.startswith("[annotate@r0] sampling ") for line in lines)
