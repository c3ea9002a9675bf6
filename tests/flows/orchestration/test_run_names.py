"""Which names of runs people have typed."""

import pytest
from prefect.utilities.names import generate_slug

from flows.orchestration.run_names import short_name, typed_name


@pytest.mark.parametrize("name", ["my-first-smoke", "first-run", "Run 7", "beta", "otter", "a-b"])
def test_the_name_of_a_person_stays(name: str) -> None:
    assert typed_name(name) == name


@pytest.mark.parametrize(
    "name", [None, "bald-stallion", "omega4-aquarii-vector", "alpha-tikal", "xi12-barad-dur"]
)
def test_a_name_that_prefect_made_up_is_none(name: str | None) -> None:
    assert typed_name(name) == ""


def test_no_name_of_prefects_server_is_taken_for_that_of_a_person() -> None:
    assert [name for name in (generate_slug(2) for _ in range(500)) if typed_name(name)] == []


def test_the_short_name_has_what_differs_between_the_runs_of_a_day() -> None:
    assert short_name("smoke", "20261128-171014-71e0f8ea") == "smoke 71e0f8ea"
    assert short_name("ppo.kl_coef", "20261128-171014-71e0f8ea.2") == "ppo.kl_coef 71e0f8ea.2"
