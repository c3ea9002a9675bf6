"""The examples in docstrings give the results that they show."""

import doctest
import importlib

import pytest

from tests.paths import ROOT

MODULES = [
    "commands.dry_run",
    "core.config",
    "serving.app",
    "serving.protocol",
    "serving.server",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # params.yaml and presets
    results = doctest.testmod(importlib.import_module(f"flows.{name}"))
    assert results.attempted > 0 and results.failed == 0
