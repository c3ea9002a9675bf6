"""RAPL's counters as Linux lays them out in sysfs, in a folder of the test's own."""

from pathlib import Path

import pytest

from flows.execution.energy import Counter, Meter, counters


def domain(
    powercap: Path, folder: str, name: str, microjoules: int, turn: int = 262_143_328_850
) -> Counter:
    (powercap / folder).mkdir(parents=True)
    (powercap / folder / "name").write_text(f"{name}\n")
    (powercap / folder / "max_energy_range_uj").write_text(f"{turn}\n")
    counter = Counter(powercap / folder)
    stands(counter, microjoules)
    return counter


def stands(counter: Counter, microjoules: int) -> None:
    (counter.folder / "energy_uj").write_text(f"{microjoules}\n")


def test_packages_alone_are_counted(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl").mkdir()  # the control type, which has no counter
    domain(tmp_path, "intel-rapl:0", "package-0", 5)
    domain(tmp_path, "intel-rapl:0:0", "core", 5)
    domain(tmp_path, "intel-rapl:0:1", "dram", 5)
    domain(tmp_path, "intel-rapl:1", "package-1", 5)
    domain(tmp_path, "intel-rapl:2", "psys", 5)  # the whole board, with the packages in it
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 5)  # the first package once more
    (tmp_path / "intel-rapl:3").symlink_to(tmp_path / "hidden")  # as a container shows it
    assert [counter.folder.name for counter in counters(tmp_path)] == [
        "intel-rapl:0",
        "intel-rapl:1",
    ]


def test_two_packages_over_an_hour_in_watt_hours(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", 1_000_000_000)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 0)
    with Meter(counters(tmp_path)) as meter:
        stands(first, 37_000_000_000)  # 36 kJ, 10 W for an hour
        stands(second, 18_000_000_000)  # 18 kJ
    assert meter.watt_hours() == pytest.approx(15)


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 9_000_000_000, turn=10_000_000_000)
    with Meter([counter]) as meter:
        for now in (
            4_000_000_000,
            8_000_000_000,
            2_600_000_000,
        ):  # 5 kJ over its end, 4 kJ, 4.6 kJ over its end
            stands(counter, now)
            meter.read()
    assert meter.watt_hours() == pytest.approx(13.6 / 3.6)


def test_no_counter_and_one_that_is_not_for_us_tell_nothing(tmp_path: Path) -> None:
    with Meter(counters(tmp_path)) as meter:
        pass
    assert meter.watt_hours() is None
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 5)
    with Meter([counter]) as meter:
        (counter.folder / "energy_uj").unlink()
        (
            counter.folder / "energy_uj"
        ).mkdir()  # an OSError for root too, to whom a file without rights opens
    assert meter.watt_hours() is None


def test_what_fails_was_measured_too(tmp_path: Path) -> None:
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Meter([counter])
    with pytest.raises(ZeroDivisionError), meter:
        stands(counter, 7_200_000_000)
        _ = 1 / 0
    assert meter.watt_hours() == pytest.approx(2)
