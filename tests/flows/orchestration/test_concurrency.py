"""Slots, on a Prefect server."""

from contextlib import ExitStack
from contextvars import copy_context
from threading import Event, Thread

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from flows.orchestration.concurrency import LIMIT, compute_slot
from tests.servers import NOWHERE


def slots(prefect: SyncPrefectClient) -> tuple[int, int]:
    """How many slots are taken, of how many."""
    limit = prefect.read_global_concurrency_limit_by_name(LIMIT)
    return limit.active_slots, limit.limit


def test_a_limit_that_a_person_set_stays(prefect: SyncPrefectClient) -> None:
    def set_limit(limit: int) -> None:
        prefect.update_global_concurrency_limit(LIMIT, GlobalConcurrencyLimitUpdate(limit=limit))

    with compute_slot(pytest.fail):
        pass  # the limit is there
    set_limit(2)
    try:
        with compute_slot(pytest.fail), compute_slot(pytest.fail):  # neither waits
            assert slots(prefect) == (2, 2)
    finally:
        set_limit(1)
    assert slots(prefect) == (0, 1)


def test_a_run_waits_for_the_slot_of_another(prefect: SyncPrefectClient) -> None:
    has_slot = Event()

    def compute() -> None:
        with compute_slot(pytest.fail):
            has_slot.set()

    waiting = Thread(target=copy_context().run, args=[compute])
    with compute_slot(pytest.fail):
        waiting.start()
        assert not has_slot.wait(3)
        with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}), compute_slot(print):
            pass  # a run with a server of its own does not wait
    assert has_slot.wait(60)
    waiting.join()
    assert slots(prefect) == (0, 1)


def test_a_stage_computes_without_a_slot_in_an_outage(prefect: SyncPrefectClient) -> None:
    lines: list[str] = []
    away = {PREFECT_API_URL: f"{NOWHERE}/api"}
    with temporary_settings(away), compute_slot(lines.append):
        assert len(lines) == 1 and lines[0].startswith("computing without a slot of rondo-compute")
    held = ExitStack()
    held.enter_context(compute_slot(pytest.fail))
    with temporary_settings(away):
        held.close()  # the slot runs out
    assert slots(prefect)[0] == 1
    prefect.delete_global_concurrency_limit_by_name(LIMIT)
