"""Which GPU a stage sees, by its environment; no GPU is needed."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from flows.execution import gpus
from flows.orchestration.concurrency import compute_slot
from stages.lib.core.errors import BadInput
from stages.lib.core.params import check_params


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


def test_a_stage_of_several_processes_has_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "0,1,2"
    monkeypatch.setenv(gpus.VISIBLE, names)
    with compute_slot(print):
        assert os.environ[gpus.VISIBLE] == "0"
        monkeypatch.setenv(gpus.VISIBLE, names)
        with compute_slot(print, 2):
            assert os.environ[gpus.VISIBLE] == "1,2"
            monkeypatch.setenv(gpus.VISIBLE, names)
            with compute_slot(print, 2):  # none is free
                assert os.environ[gpus.VISIBLE] == "0,1"


def test_more_processes_than_gpus_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = check_params({"launcher": {"processes": 2}}, "")
    for visible, refused in (("0", True), ("0,1", False)):
        monkeypatch.setenv(gpus.VISIBLE, visible)
        with (
            pytest.raises(BadInput, match="processes is 2, but only 1")
            if refused
            else nullcontext()
        ):
            gpus.check_enough(two, {"annotate@r0", "ppo@r0"})
        gpus.check_enough(two, {"annotate@r0"})
    monkeypatch.setenv(gpus.VISIBLE, "")  # on a CPU
    gpus.check_enough(two, {"ppo@r0"})
    monkeypatch.setenv(gpus.VISIBLE, "0")  # the processes are on the nodes of a cluster
    on_ray = {"processes": 2, "type": "ray", "ray_address": "http://ray:8265"}
    gpus.check_enough(check_params({"launcher": on_ray}, ""), {"ppo@r0"})


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
