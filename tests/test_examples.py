"""The examples in docstrings give the results that they show."""

import doctest
import importlib

import pytest

from tests.paths import ROOT

MODULES = [
    "stages.lib.core.files",
    "stages.lib.core.params",
    "stages.lib.core.user_functions",
    "stages.lib.metrics.stats",
    "stages.lib.metrics.text",
    "stages.lib.data.prompts",
    "stages.lib.data.splits",
    "stages.lib.dedup.contamination",
    "stages.lib.lm.packing",
    "stages.lib.judging.jury",
    "stages.lib.judging.pairwise",
    "flows.commands.dry_run",
    "flows.core.config",
    "flows.serving.app",
    "flows.serving.server",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # params.yaml and presets
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0 and results.failed == 0
