"""Energy counters (RAPL) in a folder laid out as Linux's sysfs."""

from pathlib import Path

import pytest

from flows.execution import energy
from flows.execution.energy import Counter, Meter, counters
from stages.lib.core.params import Params, check_params
from tests.engine_settings import VERL


def domain(
    powercap: Path, folder: str, name: str, microjoules: int, wrap: int = 262_143_328_850
) -> Counter:
    (powercap / folder).mkdir(parents=True)
    (powercap / folder / "name").write_text(f"{name}\n")
    (powercap / folder / "max_energy_range_uj").write_text(f"{wrap}\n")
    counter = Counter(powercap / folder)
    set_value(counter, microjoules)
    return counter


def set_value(counter: Counter, microjoules: int) -> None:
    (counter.folder / "energy_uj").write_text(f"{microjoules}\n")


def test_only_packages_are_counted(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl").mkdir()  # the control type, which has no counter
    domain(tmp_path, "intel-rapl:0", "package-0", 5)
    domain(tmp_path, "intel-rapl:0:0", "core", 5)
    domain(tmp_path, "intel-rapl:0:1", "dram", 5)
    domain(tmp_path, "intel-rapl:1", "package-1", 5)
    domain(tmp_path, "intel-rapl:2", "psys", 5)  # the whole board, including the packages
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 5)  # the first package a second time
    (tmp_path / "intel-rapl:3").symlink_to(tmp_path / "hidden")  # as in a container
    names = [counter.folder.name for counter in counters(tmp_path)]
    assert names == ["intel-rapl:0", "intel-rapl:1"]


def test_two_packages_over_an_hour_in_watt_hours(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", 1_000_000_000)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 0)
    with Meter(counters(tmp_path)) as meter:
        set_value(first, 37_000_000_000)  # 36 kJ, 10 W for an hour
        set_value(second, 18_000_000_000)  # 18 kJ
    assert meter.watt_hours() == pytest.approx(15)


def test_a_counter_that_wraps_around_is_still_added_up(tmp_path: Path) -> None:
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 9_000_000_000, wrap=10_000_000_000)
    with Meter([counter]) as meter:
        # increases: 5 kJ with a wrap, 4 kJ, 4.6 kJ with a wrap
        for value in (4_000_000_000, 8_000_000_000, 2_600_000_000):
            set_value(counter, value)
            meter.read()
    assert meter.watt_hours() == pytest.approx(13.6 / 3.6)


def test_no_counter_and_an_unreadable_one_give_no_energy(tmp_path: Path) -> None:
    with Meter(counters(tmp_path)) as meter:
        pass
    assert meter.watt_hours() is None
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 5)
    with Meter([counter]) as meter:
        # A folder, because root can read a file without read permission.
        (counter.folder / "energy_uj").unlink()
        (counter.folder / "energy_uj").mkdir()
    assert meter.watt_hours() is None


def test_a_block_that_fails_is_measured_too(tmp_path: Path) -> None:
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Meter([counter])
    with pytest.raises(ZeroDivisionError), meter:
        set_value(counter, 7_200_000_000)
        _ = 1 / 0
    assert meter.watt_hours() == pytest.approx(2)


def test_a_stage_that_computes_elsewhere_has_no_energy_here(monkeypatch):
    """This machine waits meanwhile."""
    monkeypatch.setattr(energy, "counters", lambda: ["package-0"])
    address = {"ray_address": "http://ray:8265"}
    on_ray = check_params({"launcher": {"type": "ray", **address}}, "test")
    engine = check_params({"launcher": address, "ppo": {"micro_batch_size": 4} | VERL}, "test")
    here = {
        name: [
            stage
            for stage in ("sft", "annotate", "ppo")
            if energy.counters_of(f"{stage}@r0", params)
        ]
        for name, params in (("local", Params()), ("ray", on_ray), ("engine", engine))
    }
    assert here == {
        "local": ["sft", "annotate", "ppo"],
        "ray": ["annotate"],
        "engine": ["sft", "annotate"],
    }
