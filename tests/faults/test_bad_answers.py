"""What judges, reward functions and servers answer, and what clients send to the reward service."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from flows.serving.app import make_app
from flows.serving.scoring_queue import ScoringQueue
from flows.serving.server import load_texts
from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.files import file_hash
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.user_functions import check_scores
from stages.lib.judging.endpoint import EndpointJudge, parse_verdict
from stages.lib.judging.pairwise import Comparison, Verdict
from stages.lib.lm.responses import Response
from stages.ppo.common.rewards import (
    FailedReward,
    RewardInputs,
    RewardServer,
    check_served_model,
    read_results,
)
from tests.faults.bad import STRANGE, VALUES, bad_json, examples, try_bad
from tests.flows.serving.conftest import MODEL, models, params, scorer  # noqa: F401 - fixtures

PAIR = Comparison("The day", " was good.", " was bad.")
COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "wise",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": '{"preference": "A"}'},
        }
    ],
    "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
}
INPUTS = RewardInputs(
    [{"id": "a", "prompt": "The day"}, {"id": "b", "prompt": "The night"}],
    [
        Response([1], [5, 6, 2], " was good.", ended=True),
        Response([1], [5, 6, 7, 8], " was long.", ended=False),
    ],
)
REPLY = {"rewards": [1.0, 2.5], "ids": ["a#0", "b#1"], "model": "m", "extra_logs": {}}
REQUEST = {
    "query": ["The day was good.", "The night"],
    "prompts": ["The day", "The night"],
    "ids": [7, "b"],
    "labels": ["", ""],
}


class RawServer(ThreadingHTTPServer):
    """Sends the bytes of `body` for every request; `endless`: again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RawHandler)
        self.body, self.status, self.endless = b"", 200, False
        self.headers: dict[str, str] = {"Content-Type": "application/json"}
        self.url = f"http://127.0.0.1:{self.server_port}"


class RawHandler(BaseHTTPRequestHandler):
    server: RawServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        if not self.server.endless:
            self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        try:
            self.wfile.write(self.server.body)
            while self.server.endless:
                self.wfile.write(self.server.body)
        except OSError:  # the client has had enough
            pass

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def raw_server() -> Iterator[RawServer]:
    with RawServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RawServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http_session, "TRIES", 1)
    with raw_server() as server:
        yield server


@examples(60, 400)
@given(
    st.sampled_from(('"A"', '"B"', '"tie"', '"A", "preference": "B"', '"a"', "A"))
    | st.text()
    | VALUES.map(json.dumps)
)
def test_any_text_of_a_judge(text: str) -> None:
    """ValueError is what the model is told before it is asked again."""
    answer = '{"preference": ' + text + "}"
    for shown in (text, answer, answer * 3, "{" * 2000 + answer):
        with suppress(ValueError):
            assert parse_verdict(shown, "Be fair.").preference.value in shown


def test_a_deep_answer_of_a_judge() -> None:
    with pytest.raises(ValueError, match="nested deeper"):
        parse_verdict('{"preference": ' + "[" * 100_000 + "]" * 100_000 + "}", "Be fair.")


def test_replies_of_a_judges_server(server: RawServer) -> None:
    judge = EndpointJudge(
        EndpointParams(
            base_url=f"{server.url}/v1",
            model="wise",
            rubric="Prefer A.",
            max_retries=0,
            concurrency=1,
        ),
        cache=Path("cache"),
    )
    numbers = iter(range(10**9))

    def read(body: bytes) -> Verdict | None:
        server.body = body
        # a question of its own, since answers are kept
        [verdict] = judge.compare([Comparison(f"{next(numbers)}", PAIR.a, PAIR.b)])
        return verdict

    def check(body: bytes, verdict: Verdict | None) -> None:
        content = json.loads(body)["choices"][0]["message"].get("content") or ""
        assert verdict is None or verdict.preference.value in content

    try_bad(bad_json(COMPLETION), read, check, r"annotate\.endpoint")
    usage = judge.usage()
    assert all(isinstance(value, int) for value in usage.values() if value is not None)


@pytest.mark.parametrize("status", [200, 500])
def test_an_endless_reply_of_a_judges_server(
    server: RawServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(http_session, "MAX_REPLY_BYTES", 1 << 20)
    server.body, server.endless, server.status = b" " * 65536, True, status
    endpoint = EndpointParams(
        base_url=f"{server.url}/v1", model="wise", rubric="Prefer A.", max_retries=0
    )
    with pytest.raises(Unreachable, match=r"annotate\.endpoint\.base_url"):
        EndpointJudge(endpoint, Path("cache")).compare([PAIR])


def test_a_compressed_reply_of_a_judges_server(server: RawServer) -> None:
    server.headers["Content-Encoding"] = "gzip"
    endpoint = EndpointParams(
        base_url=f"{server.url}/v1", model="wise", rubric="Prefer A.", max_retries=0
    )
    with pytest.raises(Unreachable, match=r"annotate\.endpoint\.base_url"):
        EndpointJudge(endpoint, Path("cache")).compare([PAIR])


def check_rewards(body: bytes, results: list[Any]) -> None:
    assert len(results) == 2
    failed = [result for result in results if isinstance(result, FailedReward)]
    assert all(result.reason for result in failed)
    if len(failed) < 2:
        rewards = json.loads(body)["rewards"]
        for result, reward in zip(results, rewards, strict=True):
            if not isinstance(result, FailedReward):
                assert math.isfinite(result) and result == float(reward)


def test_replies_of_a_reward_server(server: RawServer) -> None:
    """A reward that failed is named and never a number; another model stops the run."""

    def read(body: bytes) -> list[Any]:
        server.body = body
        results = RewardServer("far", server.url, str)(INPUTS)
        if all(isinstance(result, FailedReward) for result in results):
            raise RondoError(f"ppo.rewards far: {results[0].reason}; repair the reward")
        return results

    try_bad(bad_json(REPLY), read, check_rewards, r"ppo\.rewards far: (http|returned)")


def test_an_endless_reply_of_a_reward_server(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_session, "MAX_REPLY_BYTES", 1 << 20)
    server.body, server.endless = b" " * 65536, True
    results = RewardServer("far", server.url, str)(INPUTS)
    assert all("more than 1 MiB" in result.reason for result in results)  # type: ignore[union-attr]
    monkeypatch.setattr(http_session, "MAX_REPLY_BYTES", 1 << 40)
    monkeypatch.setattr("stages.ppo.common.rewards.TIMEOUT_SECONDS", 0.2)
    results = RewardServer("far", server.url, str)(INPUTS)
    assert all("did not end within 0.2 s" in str(result) for result in results)


def test_what_the_reward_service_says_of_itself(server: RawServer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    digest = file_hash(tmp_path / "model")
    good = {"status": "ok", "model": f"reward@r0 sha256:{digest}", "sha256": digest, "gate": "x"}

    def read(body: bytes) -> str:
        server.body = body
        return check_served_model(server.url, tmp_path / "model")

    def check(body: bytes, model: str) -> None:
        health = json.loads(body)
        assert health["sha256"] == digest and model == str(health["model"])

    try_bad(bad_json(good), read, check, r"ppo\.reward_url")


@examples(150, 1000)
@given(VALUES | st.lists(st.sampled_from(STRANGE), min_size=2, max_size=2))
def test_results_of_functions(values: Any) -> None:
    """Of a reward function a failure per response, of a judge's an error for all."""
    results = read_results(values, 2)
    check_rewards(json.dumps({"rewards": values}).encode(), results)
    try:
        check_scores(values, 2, "judge mine")
    except RondoError as error:
        assert "judge mine: one finite number for each of 2 responses expected" in str(error)
    else:
        assert all(math.isfinite(value) for value in values)


def test_requests_to_the_reward_service(scorer: Any) -> None:  # noqa: F811
    """400 with the key; the service goes on, and scores a good request as before."""
    queue = ScoringQueue(scorer.tokens, 4096, 10**6)
    app = make_app(MODEL, load_texts(scorer, scorer.params), queue)
    classify = {"model": "any", "input": REQUEST["query"], "use_activation": False}

    inputs = bad_json(REQUEST).map(lambda body: ("get_reward", body)) | bad_json(classify).map(
        lambda body: ("classify", body)
    )

    with TestClient(app, raise_server_exceptions=True) as client:
        expected = client.post("/get_reward", json=REQUEST).json()["rewards"]

        def read(request: tuple[str, bytes]) -> Any:
            path, body = request
            response = client.post(f"/{path}", content=body)
            if response.status_code != 200:
                assert response.status_code == 400, response.text
                assert response.json().keys() == {"error"}
                raise BadInput(f"{response.json()['error']}; correct it")
            return response.json()

        def check(request: tuple[str, bytes], reply: Any) -> None:
            sent = json.loads(request[1])
            values = reply.get("rewards") or [row["probs"][0] for row in reply["data"]]
            texts = sent["query"] if request[0] == "get_reward" else sent["input"]
            assert len(values) == (1 if isinstance(texts, str) else len(texts))
            assert all(math.isfinite(value) for value in values)

        try_bad(inputs, read, check, r"JSON|[a-z]+(\.\d+)?[:. ]", fast=100)
        assert client.post("/get_reward", json=REQUEST).json()["rewards"] == expected
    queue.close()
