"""Which GPU a stage sees, by its environment; no GPU is needed."""

import os
from pathlib import Path

import pytest

from flows.execution import gpus
from flows.orchestration.concurrency import compute_slot


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOCKS", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "driver")
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_each_slot_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "2,GPU-7f")
    with compute_slot(print):
        assert os.environ[gpus.VISIBLE] == "2"
        monkeypatch.setenv(gpus.VISIBLE, "2,GPU-7f")  # as another process sees it
        with compute_slot(print):
            assert os.environ[gpus.VISIBLE] == "GPU-7f"
            monkeypatch.setenv(gpus.VISIBLE, "2,GPU-7f")
            with compute_slot(print):  # more slots than GPUs: they share
                assert os.environ[gpus.VISIBLE] == "2"
            assert os.environ[gpus.VISIBLE] == "2,GPU-7f"
    with compute_slot(print):
        assert os.environ[gpus.VISIBLE] == "2"


def test_gpus_of_the_driver_and_machines_with_one_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (0, 1):
        with compute_slot(print):
            assert gpus.VISIBLE not in os.environ
        (tmp_path / f"driver/{count}").mkdir(parents=True)
    with pytest.raises(KeyError), compute_slot(print):  # two; the stage fails
        assert os.environ[gpus.VISIBLE] == "0"
        raise KeyError
    assert gpus.VISIBLE not in os.environ
    for value in ("", "1"):
        monkeypatch.setenv(gpus.VISIBLE, value)
        with compute_slot(print):
            assert os.environ[gpus.VISIBLE] == value
