"""Criticism and revision of SFT responses, with a real server on loopback for the chat completions
protocol.
"""

import json
import re
from pathlib import Path

import pytest

from stages.annotate.__main__ import main
from stages.annotate.revisions import parse_text, revise
from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput, Unreachable
from stages.lib.core.files import read_jsonl, write_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.judging.chat import ChatClient
from tests.stages.annotate.taught import teach
from tests.stages.judges import compared_texts, prefers

DATA, FOLDER = Path("rounds/r0/prepare/data"), Path("rounds/r0/annotate")
KIND, BRIEF = "Be kind.", "Be brief."
ROW = {"id": "p", "prompt": "The walk"}


def part(name: str, request: dict) -> str:
    """What is between the tags of a name in the first question."""
    [text] = re.findall(rf"<{name}>\n(.*?)\n</{name}>", request["messages"][1]["content"], re.S)
    return text


def is_revision(request: dict) -> bool:
    return '{"revision": "..."}' in request["messages"][3]["content"]


def criticise(request: dict) -> str:
    return f"{part('prompt', request)} lacks: {part('principle', request)}"


def author(request: dict) -> str:
    """Criticises by prompt and principle, and revises by the criticism that it was sent."""
    if "<response_A>" in request["messages"][1]["content"]:
        return '{"preference": "A"}'
    if len(request["messages"]) == 2:
        return json.dumps({"critique": criticise(request)})
    return json.dumps({"revision": f"new, as {request['messages'][2]['content']}"})


@pytest.fixture
def client(chat_server, tmp_path) -> ChatClient:
    chat_server.answer = author
    params = EndpointParams(base_url=chat_server.url, model="wise", max_retries=0)
    return ChatClient(params, tmp_path / "cache")


def revise_plain(client: ChatClient, response: str = " was dull.", principle: str = KIND):
    return revise(ROW, response, principle, client, PromptFormat.plain)


def test_a_response_is_criticised_and_then_revised_in_one_conversation(client, chat_server):
    attempt = revised_row, outcome = revise_plain(client)
    critique, revision = "The walk lacks: Be kind.", '{"critique": "The walk lacks: Be kind."}'
    assert outcome == "revised" and revised_row == {
        "id": "p",
        "prompt": "The walk",
        "response": " was dull.",
        "principle": KIND,
        "critique": critique,
        "revision": f" new, as {revision}",  # with the response's own space before it
    }
    first, second = chat_server.seen
    assert part("response", first) == "was dull." and (
        first["temperature"],
        len(chat_server.seen),
    ) == (0, 2)
    assert second["messages"][:2] == first["messages"]
    assert [message["role"] for message in second["messages"][1:]] == ["user", "assistant", "user"]
    assert second["messages"][2]["content"] == revision and is_revision(second)
    # the same again is cached; another principle or another response is not
    assert revise_plain(client) == attempt and len(chat_server.seen) == 2
    assert revise_plain(client, principle=BRIEF)[0]["principle"] == BRIEF
    revise_plain(client, response=" was long.")
    assert len(chat_server.seen) == 6


@pytest.mark.parametrize(
    ("revision", "outcome"),
    [
        ("  ", "empty"),
        ("was\n dull. ", "unchanged"),
        ("was lively.", "revised"),
        (None, "failed"),
    ],
)
def test_what_a_revision_comes_to(client, chat_server, revision, outcome):
    chat_server.answer = lambda request: (
        author(request) if len(request["messages"]) == 2 else json.dumps({"revision": revision})
    )
    row, result = revise_plain(client)
    assert result == outcome and (row is not None) == (outcome == "revised")
    assert len(chat_server.seen) == (1 + 3 if outcome == "failed" else 2)


@pytest.mark.parametrize("critique", ["no idea", '{"critique": ""}'])
def test_without_criticism_no_revision_is_requested(client, chat_server, critique):
    chat_server.answer = lambda _: critique
    assert revise_plain(client) == (None, "failed")
    assert not any(
        len(request["messages"]) > 2 and is_revision(request) for request in chat_server.seen
    )


@pytest.mark.parametrize(
    ("prompt", "prompt_format", "response", "start", "relation"),
    [
        ("The walk", "plain", " was dull.", " n", "continues the text"),
        ("The walk", "plain", "", " n", "continues the text"),
        ("The walk", "plain", "-shop was dull.", "n", "continues the text"),
        ("The walk?", "chat", "Dull.", "n", "reply to the prompt"),
        ("The walk?", "chat", "", "n", "reply to the prompt"),
        ([{"role": "user", "content": "How?"}], "plain", " Dull.", " n", "reply to the prompt"),
    ],
)
def test_a_revision_follows_its_prompt_as_the_response_did(
    client, chat_server, prompt, prompt_format, response, start, relation
):
    row = {"id": "p", "prompt": prompt}
    revised, _ = revise(row, response, KIND, client, PromptFormat(prompt_format))
    assert revised is not None and revised["revision"].startswith(f"{start}ew, as")
    assert relation in chat_server.seen[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ('{"revision": " good. "}', "good."),
        (
            '<think>{"revision": "no"}</think>\n```json\n{"revision": "two {2}\nlines"}\n```',
            "two {2}\nlines",
        ),
        ('{"why": "x", "revision": "good."} Done.', "good."),
    ],
)
def test_the_text_of_the_last_object_is_read(answer, text):
    assert parse_text(answer, "revision") == text


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("Sure! was lively.", "no JSON object with the key revision"),
        ('"revision": "good."', "no JSON object with the key revision"),
        ('{"revision": "was live', "Unterminated string"),
        ('{"revision": 3}', "revision: expected a text, and it says 3"),
    ],
)
def test_an_answer_of_another_form_is_no_revision(answer, fault):
    with pytest.raises(ValueError, match=fault):
        parse_text(answer, "revision")


def by_constitution(params: Params, url: str, **annotate: object) -> Params:
    Path("principles.txt").write_text(f"{KIND}\n{BRIEF}\n")
    endpoint = {"base_url": url, "model": "wise", "max_retries": 0}
    section = {"constitution": "principles.txt", "revisions": 6, "endpoint": endpoint, **annotate}
    changed = check_params(params.model_dump() | {"annotate": section}, "test")
    inputs(changed, "r0")
    return changed


def mixed(request: dict) -> str:
    """A different outcome for each prompt; the judge prefers the response with more characters."""
    if "<response_A>" in request["messages"][1]["content"]:
        return prefers(*map(len, compared_texts(request)))
    prompt, revises = part("prompt", request), len(request["messages"]) > 2
    if prompt == "The party" or (prompt == "The movie" and revises):
        return "no"
    if revises and prompt in ("The dinner", "The match"):
        text = part("response", request) if prompt == "The dinner" else ""
        return json.dumps({"revision": text})
    return author(request)


@pytest.mark.parametrize("annotator", ["dataset", "judge"])
def test_the_stage_revises_responses_of_sft(make_round, chat_server, annotator):
    chat_server.answer = mixed
    labels = {"annotator": annotator, "judge": "endpoint", "samples": 3, "agreement_pairs": 4}
    params = by_constitution(make_round("r0", 1.0), chat_server.url, **labels)
    main(params, "r0")
    rows = read_jsonl(FOLDER / "revised.jsonl", "")
    assert sorted(row["prompt"] for row in rows) == ["The trip", "The walk"]
    sent = {
        (part("prompt", request), part("response", request), part("principle", request))
        for request in chat_server.seen
        if "<principle>" in request["messages"][1]["content"]
    }
    assert {principle for _, _, principle in sent} == {KIND, BRIEF}
    for row in rows:
        assert row["id"] == f"p-{row['prompt']}"
        assert (row["prompt"], row["response"].strip(), row["principle"]) in sent
        assert row["critique"] == f"{row['prompt']} lacks: {row['principle']}"
        assert row["revision"].strip() == f"new, as {json.dumps({'critique': row['critique']})}"

    metrics = read_metrics()
    counts = {"prompts": 6, "revised": 2, "failed": 2, "empty": 1, "unchanged": 1}
    # dinner 2, match 2, walk 2, trip 2, party 3 (twice again), movie 1 + 3
    tokens = {"answers": 15, "tokens_in": 1500, "tokens_out": 150, "cost": None}
    assert metrics["revisions"] == counts | tokens
    # of the four held-out pairs of people
    agreement, parts = metrics["human_agreement"], metrics["human_agreement_by_principle"]
    assert agreement["pairs"] + agreement["ties"] == 4 and agreement["rate"] == 1.0
    assert sum(parts[number]["pairs"] for number in ("1", "2")) == agreement["pairs"]
    assert "principles.txt" in json.loads((FOLDER / "manifest.json").read_text())["inputs"]
    people = (DATA / "pairs_train.jsonl").read_bytes()
    labelled = (FOLDER / "data/pairs_train.jsonl").read_bytes()
    assert (labelled == people) == (annotator == "dataset")
    assert metrics["annotator"] == annotator and metrics["model"] == "wise"

    # a second run asks only the two questions without a readable answer, and writes the same
    files = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    calls = len(chat_server.seen)
    assert usage()["calls"] == 15 and usage()["cached"] == 0
    main(params, "r0")
    assert len(chat_server.seen) == calls + 6
    assert (usage()["calls"], usage()["cached"]) == (6, 9)
    assert files == {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}


def read_metrics() -> dict:
    return json.loads((FOLDER / "metrics.json").read_text())


def usage() -> dict:
    return json.loads(Path(".rondo/work/r0/annotate/usage.json").read_text())["revisions"]


def test_each_prompt_gets_its_own_response(make_round, chat_server):
    words = {"dinner": "hot", "match": "red", "party": "big", "movie": "old", "walk": "wet"}
    words["trip"] = "far"
    chat_server.answer = author
    params = by_constitution(make_round("r0", 1.0), chat_server.url, temperature=0.01)
    teach([f"The {noun} was {word}" for noun, word in words.items()])
    main(params, "r0")
    rows = read_jsonl(FOLDER / "revised.jsonl", "")
    responses = {row["prompt"]: row["response"] for row in rows}
    assert responses == {f"The {noun}": f" was {word}" for noun, word in words.items()}


def test_revisions_are_as_many_as_params_want(make_round, chat_server):
    chat_server.answer = author
    params = by_constitution(make_round("r0", 1.0), chat_server.url, revisions=2)
    main(params, "r0")
    assert (
        len(read_jsonl(FOLDER / "revised.jsonl", "")) == read_metrics()["revisions"]["prompts"] == 2
    )


def test_a_server_that_is_down_and_an_evaluation_prompt_are_errors(make_round, chat_server):
    params = by_constitution(make_round("r0", 1.0), "http://127.0.0.1:9/v1")
    with pytest.raises(Unreachable, match=r"annotate\.endpoint\.base_url .*start the server"):
        main(params, "r0")
    assert not (FOLDER / "metrics.json").exists()
    path = DATA / "prompts_train.jsonl"
    write_jsonl(path, [*read_jsonl(path, ""), {"id": "leak", "prompt": "our  MEETING"}])
    chat_server.answer = author
    params = by_constitution(params, chat_server.url, revisions=100)
    with pytest.raises(BadInput, match="leak is evaluation prompt q-Our meeting"):
        main(params, "r0")
