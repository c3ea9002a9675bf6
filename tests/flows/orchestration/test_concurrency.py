"""Slots, on a Prefect server."""

from contextlib import ExitStack
from contextvars import copy_context
from copy import copy
from itertools import count
from threading import Thread
from typing import Any

import pytest
from httpx import ConnectError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.orchestration import concurrency
from flows.orchestration.concurrency import LIMIT, Slot, compute_slot
from tests.servers import free_port, until


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
    until(lambda: slots(prefect) == (0, 1), 60)


def test_a_slot_that_prefect_lost_is_taken_again(
    prefect: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "RENEW_SECONDS", 0.05)
    lines: list[str] = []
    slot = Slot(lines.append)
    slot.wait()
    with slot.held():
        assert slot.lease
        prefect.release_concurrency_slots_with_lease(slot.lease)
        until(lambda: len(lines) == 2, 60)
        assert slots(prefect)[0] == 1
    until(lambda: slots(prefect)[0] == 0, 60)
    assert lines == [
        "Prefect lost the slot of rondo-compute, e.g. in an outage: taking it again",
        "has a slot of rondo-compute again",
    ]


def test_a_run_that_waits_for_a_slot_waits_in_an_outage_too(
    prefect: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "WAIT_SECONDS", 0.05)
    take, tries = SyncPrefectClient.increment_concurrency_slots_with_lease, count()

    def take_after_an_outage(*arguments: Any) -> Any:
        if next(tries) == 2:
            raise ConnectError("no answer")
        return take(*arguments)

    monkeypatch.setattr(
        SyncPrefectClient, "increment_concurrency_slots_with_lease", take_after_an_outage
    )
    lines: list[str] = []
    first, second = Slot(pytest.fail), Slot(lines.append)
    first.wait()
    waiting = Thread(target=copy_context().run, args=[second.wait])
    with first.held():
        waiting.start()
        until(lambda: next(copy(tries)) > 4, 60)
        assert (second.lease, slots(prefect)) == (None, (1, 1))
    waiting.join()
    with second.held():
        assert slots(prefect) == (1, 1)
    [line] = lines
    assert line.startswith("waiting: other runs use 1 of 1 slots of rondo-compute")


def test_a_stage_that_began_in_an_outage_takes_a_slot_when_one_is_free(
    prefect: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "RENEW_SECONDS", 0.05)
    lines: list[str] = []
    nowhere = {PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}
    with temporary_settings(nowhere), compute_slot(lines.append):
        pass
    assert len(lines) == 1 and lines[0].startswith("computing without a slot of rondo-compute")

    slot = Slot(lines.append)
    with ExitStack() as other:
        other.enter_context(compute_slot(pytest.fail))
        with slot.held():
            assert (slots(prefect), slot.lease) == ((1, 1), None)
            other.close()
            until(lambda: slot.lease is not None, 60)
    assert lines[1:] == ["has a slot of rondo-compute again"]
