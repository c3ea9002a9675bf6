"""A language model as judge, with a real server on loopback for the chat completions protocol."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.params import check_params
from stages.lib.core.params.judging import EndpointParams
from stages.lib.judging.chat import Answer, AnswerCache
from stages.lib.judging.endpoint import (
    EndpointJudge,
    answer_format,
    majority_preference,
    parse_verdict,
)
from stages.lib.judging.pairwise import (
    Comparison,
    Preference,
    TwoOrderVerdict,
    Verdict,
    judge_both_orders,
)
from tests.paths import ROOT
from tests.servers import free_port
from tests.stages.judges import compared_texts, prefers

KEY = "sk-very-secret"
SAY_A, SAY_B = prefers(1, 0), prefers(0, 1)
PAIR = Comparison("The day", " was good.", " was bad.")


def likes_good(request: dict) -> str:
    """Prefers the response with the word good, in either position."""
    a, b = compared_texts(request)
    return prefers("good" in a, "good" in b)


def allow_key(server: str) -> None:
    Path("pyproject.toml").write_text(f'[tool.rondo.api_keys]\nMY_KEY = ["{server}"]\n')


@pytest.fixture
def endpoint(chat_server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    allow_key(chat_server.url)

    def make(**changes) -> EndpointJudge:
        values = {
            "base_url": chat_server.url,
            "model": "wise",
            "api_key_env": "MY_KEY",
            "max_retries": 0,
            "rubric": "Be fair.",
        }
        return EndpointJudge(EndpointParams(**values | changes), tmp_path / "cache")

    return make


def test_a_preference_that_both_orders_share(endpoint, chat_server):
    chat_server.answer = likes_good
    same = Comparison("The day", " was good.", " is good.")
    judgements = judge_both_orders(endpoint(), [PAIR, PAIR.swapped(), same])
    assert [verdicts.preference for verdicts in judgements] == [
        Preference.a,
        Preference.b,
        Preference.tie,
    ]
    assert all(verdicts.first == verdicts.second for verdicts in judgements)
    request = chat_server.seen[0]
    assert (request["model"], request["temperature"]) == ("wise", 0)
    assert request["max_completion_tokens"] == 1024
    assert "Be fair." in request["messages"][0]["content"]
    assert chat_server.keys[0] == f"Bearer {KEY}"


def test_a_judge_that_always_answers_a_ties(endpoint, chat_server):
    chat_server.answer = lambda _: SAY_A
    [judgement] = judge_both_orders(endpoint(), [PAIR])
    assert judgement == TwoOrderVerdict(Verdict(Preference.a), Verdict(Preference.b))
    assert judgement.preference is Preference.tie and judgement.readable


def test_an_unreadable_answer_is_requested_again_with_its_error(endpoint, chat_server):
    answers = iter(["I like the first.", '{"preference": "first"}', f"```json\n{SAY_B}\n```"])
    chat_server.answer = lambda _: next(answers)
    judge = endpoint(concurrency=1)
    assert judge.compare([PAIR]) == [Verdict(Preference.b)]
    second, third = (
        [message["content"] for message in request["messages"]] for request in chat_server.seen[1:]
    )
    assert second[2] == "I like the first." and "no JSON object" in second[3]
    assert (
        third[:4] == second
        and third[4] == '{"preference": "first"}'
        and "preference: expected A, B or tie, and it says 'first'" in third[5]
    )
    assert judge.usage()["calls"] == 3


OTHER = Comparison("The night", " was good.", " was bad.")


def unreadable_of_days(request: dict) -> str:
    return "" if "The day" in request["messages"][1]["content"] else likes_good(request)


def test_only_unreadable_answers_give_no_verdict(endpoint, chat_server, capsys):
    chat_server.answer = unreadable_of_days
    judgement, other = judge_both_orders(endpoint(), [PAIR, OTHER])
    assert judgement == TwoOrderVerdict(None, None)
    assert judgement.preference is Preference.tie and not judgement.readable
    assert other.preference is Preference.a
    assert len(chat_server.seen) == 2 * 3 + 2
    printed = "annotate.endpoint: 2 of 4 questions so far have no readable answer, e.g. '(nothing)'"
    assert printed in capsys.readouterr().out


def test_unreadable_answers_are_not_kept(endpoint, chat_server):
    """Not by this client, and not those that are in the cache already."""
    chat_server.answer = unreadable_of_days
    judge_both_orders(endpoint(), [PAIR, OTHER])
    chat_server.seen.clear()
    chat_server.answer = likes_good
    mended = endpoint()
    verdicts = judge_both_orders(mended, [PAIR, OTHER])
    assert [verdict.preference for verdict in verdicts] == [Preference.a, Preference.a]
    assert len(chat_server.seen) == 2 and mended.usage()["cached"] == 2

    messages = chat_server.seen[0]["messages"]
    for _ in range(3):
        key = mended.chat._key(messages)
        mended.chat.answers.remove(key)
        mended.chat.answers.put(key, Answer("A", 1, 1))
        messages = [
            *messages,
            {"role": "assistant", "content": "A"},
            {
                "role": "user",
                "content": "That cannot be read: no JSON object in it. Answer with one JSON object"
                ' and nothing else: {"reason": "one sentence", "preference": "A" or "B" or "tie"}',
            },
        ]
    chat_server.seen.clear()
    verdicts = judge_both_orders(endpoint(), [PAIR, OTHER])
    assert [verdict.preference for verdict in verdicts] == [Preference.a, Preference.a]
    assert len(chat_server.seen) == 1
    assert judge_both_orders(endpoint(), [PAIR, OTHER]) == verdicts
    assert len(chat_server.seen) == 1


def test_a_judge_whose_answers_are_mostly_unreadable_ends_the_stage(endpoint, chat_server):
    chat_server.answer = lambda _: f"A is good, says {KEY}"
    message = (
        "annotate.endpoint: 2 of 2 questions so far have no readable answer, e.g. 'A is good, says "
        """***'; expected one JSON object: {"reason": "one sentence", "preference": "A" or "B" """
        'or "tie"}. Choose a model that can answer so (annotate.endpoint.model)'
    )
    with pytest.raises(BadInput, match=re.escape(message)):
        judge_both_orders(endpoint(), [PAIR])
    # of many questions, no more than needed are asked: 17, and those that were under way
    chat_server.seen.clear()
    many = [Comparison(f"The day {number}", " was good.", " was bad.") for number in range(50)]
    with pytest.raises(BadInput, match="17 of 17 questions"):
        endpoint(concurrency=1).compare(many)
    assert len(chat_server.seen) <= 18 * 3


def test_a_second_run_sends_no_request_and_gets_the_same(endpoint, chat_server):
    chat_server.answer = likes_good
    pairs = [
        PAIR,
        Comparison([{"role": "user", "content": "How was it?"}], "Good.", "It was good."),
    ]
    prices = {"price_per_million_input": 2.0, "price_per_million_output": 30.0}
    first, second = endpoint(**prices), endpoint(**prices)
    verdicts = judge_both_orders(first, pairs)
    calls = len(chat_server.seen)
    assert judge_both_orders(second, pairs) == verdicts
    assert len(chat_server.seen) == calls == 4
    # 4 answers of 100 and 10 tokens, at 2 and 30 per million
    cost = {"answers": 4, "tokens_in": 400, "tokens_out": 40, "cost": pytest.approx(0.002)}
    assert first.cost() == cost and second.cost() == cost
    tokens = {"tokens_in": 400, "tokens_out": 40}
    assert first.usage() == {
        "calls": 4,
        "cached": 0,
        **tokens,
        "paid_tokens_in": 400,
        "paid_tokens_out": 40,
        "paid": pytest.approx(0.002),
    }
    assert second.usage() == {
        "calls": 0,
        "cached": 4,
        **tokens,
        "paid_tokens_in": 0,
        "paid_tokens_out": 0,
        "paid": 0.0,
    }
    assert (
        sum(
            "Human: How was it?" in request["messages"][1]["content"]
            for request in chat_server.seen
        )
        == 2
    )
    # another rubric, or another model, is another request
    endpoint(rubric="Be strict.").compare([PAIR])
    endpoint(model="wiser").compare([PAIR])
    assert len(chat_server.seen) == calls + 2
    assert endpoint().cost()["cost"] is None


def test_a_refused_key_is_named_by_its_variable_and_never_shown(
    endpoint, chat_server, tmp_path, monkeypatch
):
    chat_server.answer = lambda _: (401, f"Incorrect API key provided: {KEY}")
    with pytest.raises(
        BadInput, match=r"annotate\.endpoint\.api_key_env MY_KEY: .* is refused .*provided: \*\*\*"
    ) as refused:
        endpoint().compare([PAIR])
    assert KEY not in str(refused.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(BadInput, match=r"api_key_env MY_KEY: .* is not set"):
        endpoint().compare([PAIR])
    assert all(
        KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )


def test_a_key_goes_to_no_server_that_the_project_does_not_list(endpoint, chat_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    chat_server.answer = lambda _: (401, "no key")
    host, port = chat_server.url.split("//")[1].split("/")[0].split(":")
    for server in (f"https://{host}:{port}", f"http://{host}:{int(port) + 1}", "http://localhost"):
        allow_key(server)
        for variable in ("MY_KEY", "AWS_SECRET_ACCESS_KEY"):
            with pytest.raises(
                BadInput,
                match=rf"{variable}: .* is not for this server .*\[tool\.rondo\.api_keys\]",
            ):
                endpoint(api_key_env=variable).compare([PAIR])
    Path("pyproject.toml").unlink()
    with pytest.raises(BadInput, match="is not for this server"):
        endpoint().compare([PAIR])
    assert not any(KEY in key for key in chat_server.keys)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (
            404,
            BadInput,
            r"model wise: .*not now.*/v1/models; .*annotate\.endpoint\.base_url lacks its /v1",
        ),
        (400, BadInput, r"model wise: .*rejects the request .*not now"),
        (429, Unreachable, "base_url http.*not now"),
        (503, Unreachable, "base_url http.*not now"),
        (418, RondoError, "base_url http.*not now"),
    ],
)
def test_an_error_of_the_server_has_a_type_and_a_next_step(
    endpoint, chat_server, status, kind, message
):
    chat_server.answer = lambda _: (status, "not now")
    with pytest.raises(RondoError, match=rf"annotate\.endpoint\.{message}") as raised:
        endpoint().compare([PAIR])
    assert type(raised.value) is kind


@pytest.mark.parametrize("body", [b"{not json", b"{}", b"[]", b'{"choices": [{"message": null}]}'])
def test_a_server_of_another_protocol(endpoint, chat_server, body):
    chat_server.raw = body
    with pytest.raises(
        RondoError,
        match=r"annotate\.endpoint\.base_url http.*: the server returned no chat completion",
    ):
        endpoint().compare([PAIR])


def test_a_server_that_is_down_loses_no_answer(endpoint, chat_server):
    chat_server.answer = lambda _: (500, "out of memory") if len(chat_server.seen) > 3 else SAY_A
    pairs = [Comparison("The day", f" was {number}.", " was bad.") for number in range(5)]
    with pytest.raises(
        Unreachable, match=r"annotate\.endpoint\.base_url http.*out of memory.*run the stage again"
    ):
        endpoint(concurrency=1).compare(pairs)
    seen = len(chat_server.seen)
    assert seen < 3 + 5  # no request was sent after one had failed
    chat_server.answer = lambda _: SAY_A
    again = endpoint(concurrency=1)
    assert again.compare(pairs) == [Verdict(Preference.a)] * 5
    assert (again.usage()["calls"], again.usage()["cached"]) == (2, 3)


def test_a_request_to_a_busy_server_is_repeated(endpoint, chat_server):
    chat_server.answer = lambda _: (429, "too many") if len(chat_server.seen) == 1 else SAY_A
    assert endpoint(max_retries=1).compare([PAIR]) == [Verdict(Preference.a)]


def test_no_server(endpoint):
    with pytest.raises(
        Unreachable,
        match=r"annotate\.endpoint\.base_url http://127\.0\.0\.1:9/v1: "
        r".*start the server.* raise annotate\.endpoint\.timeout",
    ):
        endpoint(base_url="http://127.0.0.1:9/v1").compare([PAIR])


def test_several_dimensions_in_both_orders(endpoint, chat_server):
    """Prefers the longer one as thorough and the first one as kind; all are equally true."""

    def answer(request: dict) -> str:
        a, b = compared_texts(request)
        longer = "A" if len(a) > len(b) else "B"
        return f'{{"reason": "so", "thorough": "{longer}", "kind": "A", "true": "tie"}}'

    chat_server.answer = answer
    judge = endpoint(
        rubric={"thorough": "It says more.", "kind": "It is kinder.", "true": "It is truer."}
    )
    [judgement] = judge_both_orders(judge, [Comparison("The day", " was a good one.", " was bad.")])
    # in the first order thorough and kind agree; in the second they contradict each other
    assert judgement.first == Verdict(
        Preference.a, None, {"thorough": Preference.a, "kind": Preference.a, "true": Preference.tie}
    )
    assert judgement.second is not None and judgement.second.preference is Preference.tie
    assert judgement.preference is Preference.tie
    assert judgement.dimensions == {
        "thorough": Preference.a,
        "kind": Preference.tie,
        "true": Preference.tie,
    }
    prompt = chat_server.seen[0]["messages"][0]["content"]
    assert (
        "- thorough: It says more.\n- kind: It is kinder." in prompt
        and '"kind": "A" or "B" or "tie", "true"' in prompt
    )


def test_two_servers_with_models_of_the_same_name_are_two_judges(chat_server, endpoint, tmp_path):
    chat_server.answer = lambda _: SAY_A
    endpoint().compare([PAIR])
    other = endpoint(base_url=chat_server.url.replace("127.0.0.1", "localhost"))
    other.compare([PAIR])
    assert len(chat_server.seen) == 2 and other.usage()["cached"] == 0


def test_a_message_names_its_endpoint(chat_server, tmp_path):
    chat_server.answer = lambda _: (404, "no such model")
    params = EndpointParams(
        base_url=chat_server.url, model="large", max_retries=0, rubric="Be fair."
    )
    with pytest.raises(BadInput, match=r"evaluate\.endpoints\.big\.model large"):
        EndpointJudge(params, tmp_path, key="evaluate.endpoints.big").compare([PAIR])


def test_the_first_answer_is_kept_and_can_be_read_again(tmp_path: Path) -> None:
    first, other = AnswerCache(tmp_path / "cache"), AnswerCache(tmp_path / "cache")
    assert first.get("question") is None
    assert first.put("question", Answer("A", 100, 10)) == Answer("A", 100, 10)
    assert other.put("question", Answer("B", 90, 9)) == Answer("A", 100, 10)
    assert AnswerCache(tmp_path / "cache").get("question") == Answer("A", 100, 10)


def test_threads_that_answer_at_once_agree(tmp_path: Path) -> None:
    answers = AnswerCache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        kept = list(
            pool.map(lambda number: answers.put("question", Answer(str(number), 1, 1)), range(40))
        )
    assert len(set(kept)) == 1


A, B, TIE = Preference.a, Preference.b, Preference.tie
TWO = {"kind": "Kinder.", "true": "Truer."}


@pytest.mark.parametrize(
    ("text", "expected"),
    [(SAY_A, A), (f"<think>{{A}} or {{B}}?</think>\n{SAY_B} ", B), ('{"preference":"tie"}', TIE)],
)
def test_one_preference(text, expected):
    assert parse_verdict(text, "Be fair.") == Verdict(expected)


def test_one_preference_per_dimension():
    assert parse_verdict('{"reason": "so", "kind": "B", "true": "tie"}', TWO) == Verdict(
        B, None, {"kind": B, "true": TIE}
    )
    assert (
        answer_format(TWO)
        == '{"reason": "one sentence", "kind": "A" or "B" or "tie", "true": "A" or "B" or "tie"}'
    )


@pytest.mark.parametrize("text", ["", "A", "{}", '{"preference": "C"}', "{preference: A}"])
def test_unreadable_answers(text):
    with pytest.raises(ValueError):
        parse_verdict(text, "Be fair.")


def test_a_missing_dimension_is_named():
    with pytest.raises(ValueError, match="true: expected A, B or tie, and it says None"):
        parse_verdict('{"kind": "A"}', TWO)


@pytest.mark.parametrize(
    ("preferences", "expected"), [([A, A, B], A), ([A, B], TIE), ([TIE, B, TIE], B), ([TIE], TIE)]
)
def test_the_majority_of_dimensions_decides(preferences, expected):
    assert majority_preference(dict(enumerate(preferences))) is expected


@pytest.mark.parametrize("name", ["Kind", "very kind", "", "reason"])
def test_a_dimension_needs_a_valid_metric_name(name):
    with pytest.raises(BadInput, match=r"annotate\.endpoint\.rubric"):
        check_params({"annotate": {"endpoint": {"rubric": {name: "x"}}}}, "test")


def test_no_dimension_at_all_is_refused():
    with pytest.raises(BadInput, match="one dimension at least"):
        check_params({"annotate": {"endpoint": {"rubric": {}}}}, "test")


def test_the_server_of_the_docs_is_a_judge(tmp_path: Path, monkeypatch) -> None:
    """Exactly the lines of docs/evaluation.md, started as it says."""
    text = (ROOT / "docs/evaluation.md").read_text().split("**A server of your own.**")[1]
    (tmp_path / "my_server.py").write_text(dedent(text.split("```python\n")[1].split("```")[0]))
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "my_server:app", "--port", port]
    assert "`uvicorn my_server:app --port 8000`" in text
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            assert any("Uvicorn running" in line for line in server.stderr)
            params = EndpointParams(
                base_url=f"http://127.0.0.1:{port}/v1", model="mine", rubric="Shorter is better."
            )
            longer = Comparison("A day", " was <b>good</b>.\nIndeed.", " was bad.")
            [first, second] = judge_both_orders(EndpointJudge(params), [longer, longer.swapped()])
        finally:
            server.terminate()
    assert (first.preference, second.preference) == (Preference.b, Preference.a)
    assert first.readable and second.readable
