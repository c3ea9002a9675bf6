"""The reward service over HTTP: scores, and what it answers to clients that err."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from flows.serving import app as service
from flows.serving.protocol import MAX_TEXTS
from stages.lib.core.params import check_params
from stages.lib.core.params.policy import RewardSource
from stages.lib.lm.responses import Response
from stages.ppo.common.rewards import RewardInputs, load
from tests.flows.serving.conftest import MODEL
from tests.servers import until

PROMPTS, RESPONSES = ["The day", "The night"], [" was good.", " was long and dark."]
QUERY = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
IDENTITY = "reward@r0 sha256:ab12"


def error(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert body.keys() == {"error"}
    return response.status_code, body["error"]


def test_openrlhf_gets_the_scores_of_the_stages(serve, scorer):
    expected = scorer(PROMPTS, RESPONSES)
    assert abs(expected[0] - expected[1]) > 0.01
    body = {"query": QUERY, "prompts": PROMPTS, "labels": ["", ""], "ids": [7, "b"]}
    reply = httpx.post(f"{serve()}/get_reward", json=body).json()
    assert reply == {
        "rewards": pytest.approx(expected, abs=1e-5),
        "scores": reply["rewards"],
        "extra_logs": {},
        "ids": [7, "b"],
        "model": IDENTITY,
    }


def test_the_scores_are_those_of_transformers(serve, models, scorer):
    """Calibrated by mean 0.5, standard deviation 2 (conftest)."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained("reward"),
        scorer.tokenizer,
    )
    rewards = httpx.post(f"{serve()}/get_reward", json={"query": QUERY, "prompts": PROMPTS}).json()
    for prompt, text, reward in zip(PROMPTS, RESPONSES, rewards["rewards"], strict=True):
        ids = tokenizer(prompt).input_ids + tokenizer(text).input_ids + [tokenizer.eos_token_id]
        with torch.no_grad():
            raw = model(torch.tensor([ids])).logits.item()
        assert reward == pytest.approx((raw - 0.5) / 2, abs=1e-4)


def test_special_tokens_that_engines_leave_in_a_text_do_not_count(serve, scorer):
    eos, pad = scorer.tokenizer.eos_token, scorer.tokenizer.pad_token
    url = f"{serve()}/get_reward"
    plain, ended, padded = (
        httpx.post(url, json={"query": [query], "prompts": [PROMPTS[0]]}).json()["rewards"]
        for query in (QUERY[0], QUERY[0] + eos, QUERY[0] + eos + pad * 3)
    )
    assert plain == ended == padded
    without_prompt = httpx.post(url, json={"query": [pad * 2 + QUERY[0] + eos]}).json()["rewards"]
    assert without_prompt == pytest.approx(plain, abs=1e-5)


def test_vllms_clients_get_scores_or_their_sigmoid(serve, scorer):
    [score] = scorer([PROMPTS[0]], [RESPONSES[0]])
    url = f"{serve()}/classify"
    one = httpx.post(url, json={"model": "any", "input": QUERY[0], "use_activation": False}).json()
    assert one["data"] == [
        {
            "index": 0,
            "label": "LABEL_0",
            "probs": [pytest.approx(score, abs=1e-5)],
            "num_classes": 1,
        }
    ]
    tokens = len(scorer.encode([PROMPTS[0]], [RESPONSES[0]])[0])
    assert one["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    assert (one["object"], one["model"]) == ("list", IDENTITY)
    older = httpx.post(url, json={"input": QUERY[0], "activation": False}).json()
    assert older["data"] == one["data"]
    several = httpx.post(url, json={"input": QUERY}).json()["data"]
    sigmoids = torch.tensor(scorer(PROMPTS, RESPONSES)).sigmoid().tolist()
    assert [row["probs"][0] for row in several] == pytest.approx(sigmoids, abs=1e-5)
    assert [row["index"] for row in several] == [0, 1]


def test_vllms_clients_may_send_tokens(serve, scorer):
    sequences, scores = scorer.encode(PROMPTS, RESPONSES), scorer(PROMPTS, RESPONSES)
    url = f"{serve()}/classify"
    for tokens, expected in (
        (sequences, scores),
        (sequences[:1], scores[:1]),
        (sequences[1], scores[1:]),
    ):
        reply = httpx.post(url, json={"input": tokens, "use_activation": False}).json()
        assert [row["probs"][0] for row in reply["data"]] == pytest.approx(expected, abs=1e-5)
    assert reply["usage"]["prompt_tokens"] == len(sequences[1])


def test_health_states_hash_lineage_and_verdict(serve):
    assert httpx.get(f"{serve(token='secret')}/health").json() == {
        "status": "ok",
        "model": IDENTITY,
        "name": "reward@r0",
        "folder": "rounds/r0/reward/model",
        "sha256": "ab12",
        "started_from": "sft",
        "template_hash": "cd34",
        "gate": "passed",
        "failed": [],
    }


def test_ppos_client_gets_the_scores(serve, scorer):
    """`ppo.rewards` with the server's address, as a user would configure it."""
    source = RewardSource(name="served", url=f"{serve()}/get_reward")
    client = load(source, check_params({}, "test"))
    inputs = RewardInputs(
        [{"id": "a", "prompt": PROMPTS[0]}, {"id": "b", "prompt": PROMPTS[1]}],
        [Response([1], [2], text, ended=True) for text in RESPONSES],
    )
    assert client(inputs) == pytest.approx(scorer(PROMPTS, RESPONSES), abs=1e-5)
    assert client.models == [IDENTITY]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("get_reward", b"{", "JSON: Invalid JSON: EOF"),
        ("get_reward", b"\xff", "JSON: Invalid JSON: "),
        ("get_reward", b"[" * 100_000, "JSON: Invalid JSON: recursion limit"),
        (
            "get_reward",
            b'{"query": ["\\ud800"]}',
            "JSON: Invalid JSON: unexpected end of hex",
        ),
        ("get_reward", b"[]", "JSON: Input should be an object"),
        ("get_reward", b"{}", "query: Field required"),
        ("get_reward", {"query": []}, "query: List should have at least 1 item"),
        ("get_reward", {"query": "a"}, "query: Input should be a valid array"),
        ("get_reward", {"query": ["a", 1]}, "query.1: Input should be a valid string"),
        ("get_reward", {"query": ["a"] * (MAX_TEXTS + 1)}, "query: List should have at most 16384"),
        ("get_reward", {"query": ["a"], "prompts": []}, "prompts has 0 entries, query has 1"),
        ("get_reward", {"query": ["a"], "ids": [1, 2]}, "ids has 2 entries, query has 1"),
        ("get_reward", {"query": ["a"], "ids": [[1]]}, "ids.0"),
        ("get_reward", {"query": ["a", "b " * 900]}, "query.1: has 902 tokens, the limit is 384"),
        ("get_reward", {"query": ["b " * 90_000]}, "query.0: has 180000 characters"),
        ("classify", {"input": 3}, "input: Input should be a valid array"),
        ("classify", {"input": ["a", None]}, "input.1: Input should be a valid string"),
        ("classify", {"input": "a", "use_activation": "no way"}, "use_activation: Input should be"),
        ("classify", {"input": "b " * 900}, "input.0: has 902 tokens"),
        ("classify", {"input": [[1] * 385]}, "input.0: has 385 tokens, the limit is 384"),
        ("classify", {"input": [[1], [10**6]]}, "input.1: the tokenizer has no token 1000000"),
        ("classify", {"input": [1, -1]}, "input.0: the tokenizer has no token -1"),
        ("classify", {"input": [1, "a"]}, "tokens.0.1: Input should be a valid integer"),
        ("classify", {"input": [[1], []]}, "tokens.1: List should have at least 1 item"),
        ("classify", {"input": [[1]] * (MAX_TEXTS + 1)}, "tokens: List should have at most 16384"),
        ("classify", {}, "input: Field required"),
        ("classify", {"input": None}, "input: List should have at least 1 item"),
        ("classify", {"input": 3, "tokens": [[1]]}, "input: Input should be a valid array"),
    ],
)
def test_a_bad_request_is_named(serve, path, body, message):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, text = error(httpx.post(f"{serve()}/{path}", content=content))
    assert status == 400 and message in text


def test_a_wrong_path_or_method_names_the_right_ones(serve):
    url = serve()
    for response, status in (
        (httpx.post(f"{url}/reward", json={}), 404),
        (httpx.get(f"{url}/get_reward"), 405),
    ):
        assert error(response)[0] == status
        assert "POST to /get_reward or /classify" in error(response)[1]


def test_a_token_is_required_if_there_is_one(serve):
    url = serve(token="secret")
    for path, body in (("get_reward", {"query": QUERY}), ("classify", {"input": QUERY})):
        for header in (b"", b"Bearer wrong", b"Basic secret", b"Basic \xe9", b"Bearer \xe9"):
            response = httpx.post(f"{url}/{path}", json=body, headers={"Authorization": header})
            assert error(response)[0] == 401 and "Authorization: Bearer" in error(response)[1]
        bearer = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{url}/{path}", json=body, headers=bearer).status_code == 200
        # as an address, for engines that send no headers
        address = url.replace("http://", "http://rondo:secret@")
        assert httpx.post(f"{address}/{path}", json=body).status_code == 200


def test_too_large_a_body_is_refused(serve, monkeypatch):
    monkeypatch.setattr(service, "MAX_BODY_BYTES", 1000)
    url = f"{serve()}/get_reward"

    def chunks():  # without a Content-Length
        yield from [b" " * 500] * 4

    expected = "the body has more than 1000 bytes: send fewer texts per request"
    for content in (b" " * 2000, chunks()):
        assert error(httpx.post(url, content=content)) == (413, expected)
    assert httpx.post(url, json={"query": ["a " * 200]}).status_code == 200


def test_a_body_that_states_its_size_is_refused_before_it_arrives(serve):
    host, port = serve().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_slow_client_is_turned_away_and_others_are_served(serve, monkeypatch):
    monkeypatch.setattr(service, "BODY_SECONDS", 0.5)
    url = serve()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert httpx.post(f"{url}/get_reward", json={"query": QUERY}).status_code == 200
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    with socket.create_connection((host, int(port))) as gone:
        gone.sendall(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    assert httpx.post(f"{url}/get_reward", json={"query": QUERY}).status_code == 200


def test_requests_beyond_the_queue_get_503(serve, scorer, queues):
    started, go_on = threading.Event(), threading.Event()

    def slow(sequences):
        started.set()
        go_on.wait()
        return scorer.tokens(sequences)

    url, body = f"{serve(slow, waiting=20)}/get_reward", {"query": QUERY, "prompts": PROMPTS}
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(httpx.post, url, json=body, timeout=60)
            started.wait()
            second = pool.submit(httpx.post, url, json=body, timeout=60)
            until(lambda: queues[0].waiting)
            refused = httpx.post(url, json={"query": ["a " * 30]}, timeout=60)
        finally:
            go_on.set()
        assert error(refused)[0] == 503 and "tokens wait: try again" in error(refused)[1]
        expected = pytest.approx(scorer(PROMPTS, RESPONSES), abs=1e-5)
        assert first.result().json()["rewards"] == second.result().json()["rewards"] == expected


def test_the_request_of_a_client_that_has_gone_is_not_scored(serve, scorer, queues, monkeypatch):
    monkeypatch.setattr(service, "POLL_SECONDS", 0.1)
    started, go_on, batches = threading.Event(), threading.Event(), []

    def slow(sequences):
        batches.append(len(sequences))
        started.set()
        go_on.wait()
        return scorer.tokens(sequences)

    url = f"{serve(slow)}/get_reward"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, url, json={"query": QUERY}, timeout=60)
        started.wait()
        try:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json={"query": QUERY * 3}, timeout=2)
            [gone] = queues[0].waiting
            until(gone.scores.cancelled)
        finally:
            go_on.set()
        assert first.result().status_code == 200
    assert httpx.post(url, json={"query": QUERY * 2}).status_code == 200
    assert batches == [2, 4]


def test_many_clients_at_once_get_their_own_scores(serve, scorer):
    texts = [f" was good, {i % 7} times {'very ' * (i % 11)}nice." for i in range(48)]
    expected = scorer(["The day"] * 48, texts)
    url = f"{serve()}/get_reward"

    def ask(text: str) -> float:
        body = {"query": ["The day" + text], "prompts": ["The day"]}
        return httpx.post(url, json=body, timeout=60).json()["rewards"][0]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, texts)) == pytest.approx(expected, abs=1e-5)


def test_a_model_that_fails_answers_500_and_goes_on(serve, scorer, capfd):
    failures = [RuntimeError("out of memory"), None]

    def score(sequences):
        if failure := failures.pop(0):
            raise failure
        return [float("nan")] * len(sequences) if failures == ["nan"] else scorer.tokens(sequences)

    url, body = f"{serve(score)}/get_reward", {"query": QUERY}
    assert error(httpx.post(url, json=body)) == (500, "RuntimeError: out of memory")
    assert "reward@r0: RuntimeError: out of memory" in capfd.readouterr().err
    assert httpx.post(url, json=body).status_code == 200
    failures += [None, "nan"]
    status, text = error(httpx.post(url, json=body))
    assert status == 500 and text.startswith("NotFinite: a score is not finite: [nan, nan]")


def test_the_identity_is_that_of_the_model():
    assert f"{MODEL.name} sha256:{MODEL.sha256}" == IDENTITY
