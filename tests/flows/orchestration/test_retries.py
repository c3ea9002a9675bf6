"""The delays of flows/orchestration/retries.py; tests/flows/test_pipeline.py has stages retried."""

import pytest

from flows.orchestration import retries
from stages.lib.core.errors import BadInput


def test_the_delays_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDO_NETWORK_WAITS", raising=False)
    assert retries.retry_delays() == [10, 60, 300]
    for value, expected in (("", []), ("1, 0.5", [1, 0.5])):
        monkeypatch.setenv("RONDO_NETWORK_WAITS", value)
        assert retries.retry_delays() == expected
    for value in ("soon", "1,-2", "inf"):
        monkeypatch.setenv("RONDO_NETWORK_WAITS", value)
        with pytest.raises(BadInput, match=rf"RONDO_NETWORK_WAITS={value}: expected seconds"):
            retries.retry_delays()
