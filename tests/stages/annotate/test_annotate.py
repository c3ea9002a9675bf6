"""The annotate stage on a round from disk: people's labels copied, and a judge's labels of the tiny
model's responses.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.annotate.__main__ import main
from stages.annotate.ai_labels import compare_all
from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_jsonl, write_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.judging.lexicon import LexiconJudge, lexicon_preference, lexicon_scores
from tests.paths import ROOT
from tests.stages.annotate.taught import teach
from tests.stages.judges import compared_texts, prefers

DATA, FOLDER = Path("rounds/r0/prepare/data"), Path("rounds/r0/annotate")
LABELS = FOLDER / "data/pairs_train.jsonl"
KEY = "sk-very-secret"


def with_judge(params: Params, **annotate: object) -> Params:
    return check_params(
        params.model_dump() | {"annotate": {"annotator": "judge", "samples": 3, **annotate}}, "test"
    )


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def add_replayed_pair() -> dict:
    """A pair from replay, appended to people's pairs."""
    row = {
        "id": "replay-1",
        "prompt": "The dinner",
        "chosen": " was great.",
        "rejected": " was!!!",
        "source": "replay",
        "badcase": "1",
    }
    write_jsonl(DATA / "pairs_train.jsonl", [*read_jsonl(DATA / "pairs_train.jsonl", ""), row])
    return row


def test_peoples_labels_are_copied_and_torch_is_not_imported(make_round):
    params = make_round("r0", 1.0)
    add_replayed_pair()
    main(params, "r0")
    assert LABELS.read_bytes() == (DATA / "pairs_train.jsonl").read_bytes()
    assert read(FOLDER / "metrics.json") == {"annotator": "dataset", "pairs": 6 * 9 + 1}
    assert (FOLDER / "revised.jsonl").read_bytes() == b""
    command = (
        "import sys, stages.annotate.__main__;"
        " sys.exit('torch' in sys.modules or 'openai' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False).returncode == 0


def test_missing_data_name_the_stage_that_writes_them(make_round):
    params = make_round("r0", 1.0)
    (DATA / "pairs_train.jsonl").unlink()
    with pytest.raises(BadInput, match="run `dvc repro prepare@r0`"):
        main(params, "r0")


def test_a_pair_has_its_provenance():
    """Two of four responses are equal: the three distinct ones are compared in all pairs."""
    responses = [" was there.", " was awful.", " was wonderful.", " was awful."]
    rows = [{"id": "p", "prompt": "The walk"}, {"id": "q", "prompt": "The trip"}]
    [pair], judgements = compare_all(
        LexiconJudge(0.05), rows, [responses, [" was on.", " was off."]], [None, None]
    )
    bad, good = lexicon_scores(["The walk"] * 2, responses[1:3])
    assert pair == {
        "id": "judge-p",
        "prompt": "The walk",
        "chosen": " was wonderful.",
        "rejected": " was awful.",
        "source": "judge",
        "annotator": {
            "judge": "lexicon",
            "samples": [" was there.", " was awful.", " was wonderful."],
            "scores": [1.0, 0.0, 2.0],
            "confidence": (good.sentiment - bad.sentiment) / 2,
        },
    }
    assert len(judgements) == 3 + 1


def test_the_lexicon_labels_sft_responses(make_round):
    params, replayed = with_judge(make_round("r0", 1.0), samples=4), add_replayed_pair()
    teach(
        [
            f"The {noun} was {word}"
            for noun in ("dinner", "match", "party", "movie", "walk", "trip")
            for word in ("sad", "fun", "bad")
        ]
    )
    main(params, "r0")
    *pairs, last = read_jsonl(LABELS, "")
    assert last == replayed and {row["source"] for row in pairs} == {"judge"}
    for row in pairs:
        good, bad = lexicon_scores([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
        assert lexicon_preference(good, bad, params.evaluate.tie_margin) == 1
    metrics = read(FOLDER / "metrics.json")
    assert (
        metrics["pairs"] == len(pairs) >= 3
        and metrics["pairs"] + metrics["ties"] == metrics["prompts"] == 6
    )
    assert (metrics["replayed"], metrics["position_consistency"], metrics["unparsable"]) == (
        1,
        1.0,
        0,
    )
    # people prefer "wonderful" to "awful", and so does the lexicon
    assert metrics["human_agreement"]["rate"] == 1.0


def test_a_language_model_labels_the_tiny_models_responses(make_round, chat_server, monkeypatch):
    """It prefers the response with more characters."""

    def longer(request: dict) -> str:
        return prefers(*map(len, compared_texts(request)))

    chat_server.answer = longer
    monkeypatch.setenv("MY_KEY", KEY)
    Path("pyproject.toml").write_text(f'[tool.rondo.api_keys]\nMY_KEY = ["{chat_server.url}"]\n')
    endpoint = {"base_url": chat_server.url, "model": "wise", "api_key_env": "MY_KEY"}
    endpoint["rubric"] = "Be fair."
    params = with_judge(
        make_round("r0", 1.0),
        judge="endpoint",
        prompts=5,
        samples=4,
        agreement_pairs=100,
        endpoint=endpoint,
    )
    main(params, "r0")
    files = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    calls, usage = len(chat_server.seen), Path(".rondo/work/r0/annotate/usage.json")
    assert read(usage)["calls"] == calls > 0

    pairs = read_jsonl(LABELS, "")
    metrics = read(FOLDER / "metrics.json")
    assert len(pairs) == metrics["pairs"] == 5 - metrics["ties"] > 0
    for row in pairs:
        lengths = [len(text) for text in row["annotator"]["samples"]]
        assert (len(row["chosen"]), len(row["rejected"])) == (max(lengths), min(lengths))
        assert row["annotator"]["model"] == "wise" and row["prompt"].startswith("The ")
    # people's pairs for each of two prompts: "wonderful", "great" and "lovely" are longer than
    # "awful", "sad" and "dull", except that "great" and "awful" are equally long
    agreement = metrics["human_agreement"]
    assert (agreement["pairs"], agreement["rate"], agreement["ties"]) == (2 * 8, 1.0, 2)
    assert (metrics["position_consistency"], metrics["kappa"], metrics["unparsable"]) == (
        1.0,
        1.0,
        0,
    )
    assert (
        metrics["answers"] == 2 * (metrics["comparisons"] + 18)
        and metrics["tokens_out"] == 10 * metrics["answers"]
    )
    assert metrics["cost"] is None

    # a second run makes no call and writes the same bytes; no file contains the key
    main(params, "r0")
    assert len(chat_server.seen) == calls and read(usage)["cached"] == metrics["answers"]
    assert files == {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert all(
        KEY.encode() not in path.read_bytes() for path in Path().rglob("*") if path.is_file()
    )


def test_a_judge_that_prefers_no_response_is_an_error_with_its_numbers(make_round, chat_server):
    chat_server.answer = lambda _: '{"preference": "A"}'
    params = with_judge(
        make_round("r0", 1.0),
        judge="endpoint",
        endpoint={"base_url": chat_server.url, "model": "wise", "rubric": "Be fair."},
    )
    with pytest.raises(
        RondoError,
        match=r"prefers no response for any of 6 prompts with 3 responses each"
        r" \(.* both orders agree in 0\.0 of",
    ):
        main(params, "r0")
    assert not (FOLDER / "metrics.json").exists()


def test_an_evaluation_prompt_is_refused(make_round):
    params = with_judge(make_round("r0", 1.0))
    path = DATA / "prompts_train.jsonl"
    write_jsonl(path, [*read_jsonl(path, ""), {"id": "leak", "prompt": "our  MEETING"}])
    with pytest.raises(BadInput, match="leak is evaluation prompt q-Our meeting"):
        main(params, "r0")


LONG, SHORT = "The response is long.", "The response is short."


def by_length(request: dict) -> str:
    """Prefers the longer or the shorter response, as the request's principle wants it."""
    instruction = request["messages"][0]["content"]
    a, b = map(len, compared_texts(request))
    assert (LONG in instruction) != (SHORT in instruction)
    return prefers(a, b) if LONG in instruction else prefers(b, a)


def test_a_constitution_labels_in_place_of_the_rubric(make_round, chat_server):
    chat_server.answer = by_length
    endpoint = {"base_url": chat_server.url, "model": "wise", "rubric": "Be fair."}
    labels = {"judge": "endpoint", "constitution": "principles.txt", "endpoint": endpoint}
    params = with_judge(make_round("r0", 1.0), agreement_pairs=100, **labels)
    Path("principles.txt").write_text(f"{LONG}\n\n{SHORT}\n")
    inputs(params, "r0")
    main(params, "r0")

    pairs, metrics = read_jsonl(LABELS, ""), read(FOLDER / "metrics.json")
    assert {row["annotator"]["principle"] for row in pairs} == {LONG, SHORT}
    for row in pairs:
        sizes = sorted(len(text) for text in row["annotator"]["samples"])
        shortest, longest = sizes[0], sizes[-1]
        wanted = row["annotator"]["principle"] == LONG
        expected = (longest, shortest) if wanted else (shortest, longest)
        assert (len(row["chosen"]), len(row["rejected"])) == expected
    # both orders of a comparison have one principle
    assert metrics["position_consistency"] == 1.0
    # What people chose is the longer one of all their 16 pairs that are not equally long (2 ties)
    total, parts = metrics["human_agreement"], metrics["human_agreement_by_principle"]
    assert parts["1"]["rate"] == 1.0 and parts["2"]["rate"] == 0.0
    assert parts["1"]["pairs"] + parts["2"]["pairs"] == total["pairs"] == 16
    assert parts["1"]["ties"] + parts["2"]["ties"] == total["ties"] == 2
    assert total["rate"] == parts["1"]["pairs"] / 16
    assert not any("Be fair." in str(request) for request in chat_server.seen)
    hashes = read(FOLDER / "manifest.json")["inputs"]
    assert (
        hashes["principles.txt"] == read(Path("assets/inputs/constitution.json"))["principles.txt"]
    )

    # fewer prompts get the same principles, so all answers are cached; another wording is not
    calls = len(chat_server.seen)
    main(with_judge(params, prompts=3, **labels), "r0")
    assert len(chat_server.seen) == calls
    Path("principles.txt").write_text(f"{LONG}\n{SHORT} Very short.\n")
    with pytest.raises(BadInput, match=r"principles\.txt changed after the run began"):
        main(params, "r0")
    inputs(params, "r0")
    main(params, "r0")
    new = [request["messages"][0]["content"] for request in chat_server.seen[calls:]]
    assert new and all("Very short." in instruction for instruction in new)
