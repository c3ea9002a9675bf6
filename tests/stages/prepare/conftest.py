"""A workspace with the tiny assets, built once."""

import json
import os
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from stages.assets.__main__ import main as build_assets
from stages.assets.inputs import main as inputs
from stages.lib.core.params import Params, check_params


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with chdir(folder):
        build_assets(check_params({"assets": {"model": "tiny", "data": "tiny"}}, "test"), "r0")
    return folder / "assets"


@pytest.fixture
def workspace(tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with assets/model, assets/start, and assets/data for tests to fill."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets/data").mkdir(parents=True)
    for name in ("model", "start"):
        os.symlink(tiny_assets / name, tmp_path / "assets" / name)
    return tmp_path


@pytest.fixture
def tiny_params(workspace: Path, tiny_assets: Path) -> Callable[..., Params]:
    """Params of the tiny data, or of `sources` given as {file name: rows or lines}."""

    def make(sources: dict[str, list[Any]] | None = None, seed: int = 0, **prepare: Any) -> Params:
        if sources is None:
            (workspace / "assets/data/tweets.tsv").write_bytes(
                (tiny_assets / "data/tweets.tsv").read_bytes()
            )
            return check_params(
                {"seed": seed, "assets": {"data": "tiny"}, "prepare": prepare}, "test"
            )
        for name, rows in sources.items():
            Path(name).write_text(
                "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
            )
        listed = [{"path": name, "use": "eval" if "eval" in name else "train"} for name in sources]
        params = check_params(
            {"seed": seed, "assets": {"data": "files"}, "prepare": {"sources": listed, **prepare}},
            "test",
        )
        if listed:
            inputs(params, "r0")
        return params

    return make
