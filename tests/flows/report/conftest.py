"""A project folder in which no stage has run yet."""

from pathlib import Path

import pytest

from stages.lib.core.files import write_text


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text(Path("params.yaml"), "seed: 3\n")
    return tmp_path
