"""The examples in docstrings give the results that they show."""

import doctest
import importlib

import pytest

MODULES = [
    "core.files",
    "core.params",
    "core.user_functions",
    "metrics.stats",
    "metrics.text",
    "data.prompts",
    "data.splits",
    "dedup.contamination",
    "lm.packing",
    "judging.jury",
    "judging.pairwise",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"stages.lib.{name}"))
    assert results.attempted > 0 and results.failed == 0
