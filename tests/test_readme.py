"""The tables of README.md and docs/default.md are those of the committed rounds."""

from pathlib import Path

import pytest

from docs.bench import default_run
from tests.paths import ROOT


@pytest.mark.parametrize("name", default_run.TABLES)
def test_the_table_is_that_of_the_committed_rounds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails: `python docs/bench/default_run.py --write`, and read the text around it."""
    monkeypatch.chdir(ROOT)
    text = Path(name).read_text()
    assert default_run.replace(text, default_run.TABLES[name]()) == text


def test_a_win_rate_decides_only_if_its_interval_does() -> None:
    assert [
        default_run.answer(*interval) for interval in ((0.51, 0.7), (0.3, 0.49), (0.4, 0.6))
    ] == ["yes", "no", "undecided"]


def test_a_table_goes_between_its_markers() -> None:
    text = "a\n<!-- default run -->\nold\n<!-- end -->\nb\n"
    assert (
        default_run.replace(text, "| new |\n")
        == "a\n<!-- default run -->\n\n| new |\n\n<!-- end -->\nb\n"
    )
