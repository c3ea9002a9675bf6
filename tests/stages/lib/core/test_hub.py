"""Errors that huggingface_hub and datasets really raise, with a real server on loopback that
returns errors only, and with no server.
"""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from stages.assets.base_model import write_model
from stages.assets.datasets import write_data
from stages.lib.core import hub
from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.params import check_params
from stages.lib.core.params.data import SourceParams
from stages.lib.judging.loading import load_judge
from stages.ppo.common.rewards import load_rewards
from stages.prepare.files import read_source

NOWHERE = "http://127.0.0.1:9"
PARAMS = check_params({"assets": {"model": "org/mine@main", "data": "org/mine@main"}}, "test")
MINE = "org/mine@main"
REWARDS = check_params({"ppo": {"rewards": [{"name": "a", "model": MINE}]}}, "test")
CALLS = {
    "evaluate.judges org/mine@main": lambda _: load_judge(MINE, PARAMS, "r0", lambda: None),
    "ppo.rewards a org/mine@main": lambda _: load_rewards(REWARDS),
    "assets.model org/mine@main": lambda folder: write_model(PARAMS, folder),
    "assets.data org/mine@main": lambda folder: write_data(PARAMS, folder),
    "prepare.sources org/mine@main": lambda _: read_source(
        SourceParams(path="org/mine@main"), None
    ),
}


@pytest.fixture
def hub_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the hub's address, which both libraries read at import, and skips the 23 s that they
    wait between their own retries.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)

    def at(url: str) -> None:
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url),
        )
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)

    return at


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, None, Unreachable),
        (429, None, Unreachable),
        (404, "RepoNotFound", BadInput),
        (403, "GatedRepo", BadInput),
        (401, None, BadInput),
    ],
)
def test_a_hub_that_is_down_and_one_that_refuses(
    what: str,
    status: int,
    code: str | None,
    kind: type[RondoError],
    hub_at,
    status_server,
    tmp_path: Path,
) -> None:
    hub_at(status_server(status, code))
    with pytest.raises(kind, match=f"^{what}: ") as raised:
        CALLS[what](tmp_path)
    assert ("cannot be reached" in str(raised.value)) == (kind is Unreachable)


@pytest.mark.parametrize("what", CALLS)
def test_no_hub(what: str, hub_at, tmp_path: Path) -> None:
    hub_at(NOWHERE)
    with pytest.raises(
        Unreachable, match=f"(?s)^{what}: the hub cannot be reached .*run the same again"
    ):
        CALLS[what](tmp_path)


@pytest.mark.parametrize("what", CALLS)
def test_offline(what: str, hub_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_at(NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        BadInput, match=f"^{what}: the hub is not contacted because HF_HUB_OFFLINE is set"
    ):
        CALLS[what](tmp_path)


def test_a_server_that_closes_the_connection(hub_at, status_server, tmp_path: Path) -> None:
    hub_at(status_server(None))
    with pytest.raises(
        Unreachable, match=r"assets\.model org/mine@main: the hub cannot be reached .*disconnected"
    ):
        write_model(PARAMS, tmp_path)


def test_a_split_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` reads a local folder as it reads a hub repository."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"a": 1}\n')
    folder = str(tmp_path / "data")
    with pytest.raises(BadInput, match=r"^prepare\.sources .*/data: no split nope \("):
        hub.load_data_set(folder, "prepare.sources", "no split nope", split="nope")


def test_an_invalid_name(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput,
        match=r"assets\.model a//b@main: the hub gives no such model; check name and revision",
    ):
        write_model(check_params({"assets": {"model": "a//b@main"}}, "test"), tmp_path)


def test_a_missing_folder_is_never_a_name_of_the_hub(hub_at, status_server, tmp_path: Path) -> None:
    """A stranger may have published models/mine there."""
    hub_at(status_server(500))
    params = check_params({"assets": {"model": "models/mine", "data": "data/mine"}}, "test")
    for call in (
        lambda: write_model(params, tmp_path),
        lambda: write_data(params, tmp_path),
        lambda: read_source(SourceParams(path="data/mine"), None),
    ):
        with pytest.raises(BadInput, match="no such file or folder here; for the hub, add the com"):
            call()


def test_an_error_of_our_own_code_is_not_translated() -> None:
    with pytest.raises(KeyError), hub.hub_errors("assets.data x", "no"):
        raise KeyError("id")
