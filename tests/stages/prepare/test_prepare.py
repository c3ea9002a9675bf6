"""The prepare stage: the tiny data in two rounds, the users' files, and errors."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from docs.bench.families import tokenizer_of
from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, read_jsonl, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.types import Row
from stages.prepare.__main__ import main

MakeParams = Callable[..., Params]
TRAIN = ("sft_train", "pairs_train", "prompts_train")
EVAL = ("sft_eval", "pairs_eval", "eval_prompts")


def rows_of(round_: str, *names: str) -> list[Row]:
    return [
        row
        for name in names
        for row in read_jsonl(Path(f"rounds/{round_}/prepare/data/{name}.jsonl"), "the test")
    ]


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def opening(row: Row) -> tuple[str, ...]:
    """The first four words of a row's text."""
    text = row["prompt"] + row.get("completion", row.get("chosen", ""))
    return tuple(text.casefold().split()[:4])


def pair(number: int, **changed: Any) -> Row:
    words = ["sun", "rain", "wind", "snow", "fog", "hail", "storm", "cloud", "frost", "heat"]
    subject = f"{words[number % 10]} {words[number // 10]}"
    return {
        "prompt": f"Tell me of {subject} {number}",
        "chosen": f" It is {subject}.",
        "rejected": f" No {subject}.",
        **changed,
    }


PAIRS = [pair(i) for i in range(20)]


@pytest.fixture
def chat_template(workspace: Path) -> Path:
    """The chat template of a base model of the test's own."""
    model = workspace / "assets/model"
    shutil.copytree(model, workspace / "mine")
    model.unlink()
    shutil.move(workspace / "mine", model)
    return model / "chat_template.jinja"


SYSTEM_TURN = pair(
    20, prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
)


def test_a_prompt_that_the_chat_template_refuses_is_a_bad_row(
    tiny_params: MakeParams, chat_template: Path
) -> None:
    refuse = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    )
    chat_template.write_text(refuse + chat_template.read_text())
    sources = {"own.jsonl": [*PAIRS, SYSTEM_TURN]}
    main(tiny_params(sources, prompt_format="chat", max_bad_share=0.05), "r0")
    assert read("rounds/r0/prepare/metrics.json")["rows_bad"] == 1
    [bad] = read("rounds/r0/prepare/data/audit.json")["dropped"]["bad row"]
    assert bad["where"] == "own.jsonl:21"
    assert bad["reason"] == "the chat template refuses the prompt: No system role"
    with pytest.raises(
        BadInput, match=r"1 of 21 rows are bad(.|\n)*own.jsonl:21: .*No system role"
    ):
        main(tiny_params(sources, prompt_format="chat", max_bad_share=0.04), "r0")
    main(tiny_params(sources, prompt_format="plain", max_bad_share=0.0), "r0")


def test_a_chat_template_that_cannot_be_used_is_refused_before_the_data(
    tiny_params: MakeParams, chat_template: Path
) -> None:
    chat_template.write_text("{% for message in messages %}")
    with pytest.raises(BadInput, match="chat template of assets/model cannot render"):
        main(tiny_params({"own.jsonl": ["no JSON"]}, prompt_format="chat"), "r0")


def test_answers_are_not_learnt_as_thoughts(tiny_params: MakeParams, chat_template: Path) -> None:
    """By the template of Qwen3.5, which begins a thought in each prompt unless told not to."""
    template = tokenizer_of("qwen3_5_text").chat_template
    chat_template.write_text(template)
    with pytest.raises(BadInput, match=r"answer with <think>, and (\d+) of \1 responses have no"):
        main(tiny_params({"own.jsonl": PAIRS}, prompt_format="chat"), "r0")
    main(tiny_params({"own.jsonl": PAIRS}, prompt_format="plain"), "r0")
    thoughtful = [row | {"chosen": f"Hm.</think>{row['chosen']}"} for row in PAIRS]
    main(tiny_params({"own.jsonl": thoughtful}, prompt_format="chat"), "r0")
    chat_template.write_text("{% set enable_thinking = false +%}" + template)  # as assets writes it
    main(tiny_params({"own.jsonl": PAIRS}, prompt_format="chat"), "r0")


def test_tiny_data_have_each_text_on_one_side(tiny_params: MakeParams) -> None:
    main(tiny_params(), "r0")
    train, held_out = rows_of("r0", *TRAIN), rows_of("r0", *EVAL)
    assert not {opening(row) for row in train} & {opening(row) for row in held_out}
    ids = [
        {part for row in rows for part in row["id"].split("-")[1:]} for rows in (train, held_out)
    ]
    assert not ids[0] & ids[1]
    assert all(
        row["completion"].startswith(" ") and len(row["prompt"].split()) == 4
        for row in rows_of("r0", "sft_train", "sft_eval")
    )
    assert 2 * len(held_out) < len(train)
    counts = read("rounds/r0/prepare/metrics.json")
    assert counts["rows_read"] == 400 and counts["rows_bad"] == counts["replayed"] == 0
    assert {name: counts[name] for name in (*TRAIN, *EVAL)} == {
        name: len(rows_of("r0", name)) for name in (*TRAIN, *EVAL)
    }


def test_two_rounds_share_the_evaluation_set(tiny_params: MakeParams) -> None:
    main(tiny_params(), "r0")
    bad = {"id": "b1", "prompt": "My trip in space", "badcase": "r0-1", "source": "replay"}
    for name, row in (
        ("sft", {**bad, "completion": " was fine"}),
        ("pairs", {**bad, "chosen": " a", "rejected": " b"}),
        ("prompts", bad),
    ):
        write_jsonl(Path(f"rounds/r0/replay/data/{name}.jsonl"), [row])
    main(tiny_params(), "r1")
    hashes = [
        read(f"rounds/{round_}/prepare/manifest.json")["evaluation_hash"] for round_ in ("r0", "r1")
    ]
    files = [
        Path(f"rounds/r1/prepare/data/{name}.jsonl").read_bytes()
        for name in ("eval_prompts", "sft_eval", "pairs_eval")
    ]
    assert hashes == [hashlib.sha256(b"".join(files)).hexdigest()] * 2
    assert read("rounds/r1/prepare/metrics.json")["replayed"] == 3
    for name in TRAIN:
        assert rows_of("r1", name)[:-1] == rows_of("r0", name)
        assert rows_of("r1", name)[-1]["badcase"] == "r0-1"
    with pytest.raises(BadInput, match="frozen"):
        main(tiny_params(seed=1), "r1")


def test_outputs_are_the_same_bytes_twice(tiny_params: MakeParams) -> None:
    hashes = []
    for _ in range(2):
        main(tiny_params(prompt_format="chat"), "r0")
        hashes.append(file_hash(Path("rounds/r0/prepare")))
    assert hashes[0] == hashes[1]
    assert rows_of("r0", "eval_prompts")[0]["prompt"][0]["role"] == "user"
    report = read("reports/r0/data.json")
    assert report["examples"]["sft_train"] == rows_of("r0", "sft_train")[:3]
    assert "<title>Data of round r0</title>" in Path("reports/r0/data.html").read_text()


def test_pairs_alone_make_all_sets(tiny_params: MakeParams) -> None:
    main(tiny_params({"mine.jsonl": PAIRS}, eval_share=0.2), "r0")
    assert [len(rows_of("r0", name)) for name in (*TRAIN, *EVAL)] == [16, 16, 16, 4, 4, 4]
    first = rows_of("r0", "pairs_train")[0]
    number = int(first["id"].removeprefix("mine.jsonl:"))
    assert first == {"id": f"mine.jsonl:{number}", **PAIRS[number - 1], "source": "mine.jsonl"}
    assert rows_of("r0", "sft_train")[0]["completion"] == first["chosen"]


def test_demonstrations_and_held_out_files_are_used_as_given(tiny_params: MakeParams) -> None:
    demonstrations = [
        {"prompt": f"{row['prompt']} please", "completion": row["chosen"]} for row in PAIRS[10:]
    ]
    sources = {
        "pairs.jsonl": PAIRS[:8],
        "pairs_eval.jsonl": PAIRS[8:10],
        "shown.jsonl": demonstrations,
    }
    main(tiny_params(sources, eval_share=0.3, max_eval_prompts=3), "r0")
    assert [len(rows_of("r0", name)) for name in (*TRAIN, *EVAL)] == [7, 8, 15, 3, 2, 3]
    assert {row["source"] for row in rows_of("r0", "pairs_eval")} == {"pairs_eval.jsonl"}
    assert {row["source"] for row in rows_of("r0", "sft_train", "sft_eval")} == {"shown.jsonl"}


def test_parquet_is_read_as_jsonl_is(tiny_params: MakeParams) -> None:
    main(tiny_params({"mine.jsonl": PAIRS}), "r0")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), "mine.parquet")
    params = tiny_params({"mine.jsonl": []})
    params.prepare.sources[0].path = "mine.parquet"
    inputs(params, "r0")
    before = [{**row, "id": "", "source": ""} for row in rows_of("r0", "pairs_train")]
    main(params, "r0")
    assert [{**row, "id": "", "source": ""} for row in rows_of("r0", "pairs_train")] == before


def test_every_bad_row_is_reported_with_its_line(tiny_params: MakeParams) -> None:
    sources = {
        "mine.jsonl": [
            *PAIRS[:10],
            "{not json",
            "",
            pair(10, chosen=""),
            *PAIRS[11:],
            pair(3),
            pair(90, prompt="Z" * 70),
        ]
    }
    main(tiny_params(sources, max_bad_share=0.1), "r0")
    audit = read("rounds/r0/prepare/data/audit.json")
    lost = audit["dropped"]
    assert [row["where"] for row in lost["bad row"]] == ["mine.jsonl:11", "mine.jsonl:13"]
    assert "not JSON" in lost["bad row"][0]["reason"]
    assert lost["bad row"][1]["reason"] == "`chosen` is empty"
    assert '"chosen": ""' in lost["bad row"][1]["text"]
    text = "Tell me of snow sun 3 | It is snow sun. | No snow sun."
    assert lost["exact duplicate"] == [
        {"where": "mine.jsonl:23", "of": "mine.jsonl:4", "text": text}
    ]
    assert [row["where"] for row in lost["prompt longer than prepare.max_prompt_tokens"]] == [
        "mine.jsonl:24"
    ]
    assert audit["by_cause"] == {
        "bad row": 2,
        "exact duplicate": 1,
        "prompt longer than prepare.max_prompt_tokens": 1,
    }
    assert (audit["rows_read"], audit["rows_kept"]) == ({"mine.jsonl": 23}, 19)
    counts = read("rounds/r0/prepare/metrics.json")
    assert (counts["rows_read"], counts["rows_bad"], counts["exact_duplicates"]) == (23, 2, 1)


@pytest.mark.parametrize(("speaker_markers", "dropped"), [("drop", 3), ("keep", 0)])
def test_turns_with_another_speaker_are_dropped_and_counted_by_line(
    tiny_params: MakeParams, speaker_markers: str, dropped: int
) -> None:
    """They are no bad rows, of which more than max_bad_share would stop the stage."""
    rows = [*PAIRS[:4], *(pair(number, chosen=f"Human: {number}") for number in (4, 5, 6))]
    sources = {"mine.jsonl": [*rows, *PAIRS[7:]]}
    main(tiny_params(sources, max_bad_share=0.0, speaker_markers=speaker_markers), "r0")
    audit = read("rounds/r0/prepare/data/audit.json")["dropped"].get("another speaker", [])
    assert [row["where"] for row in audit] == [f"mine.jsonl:{n}" for n in (5, 6, 7)][:dropped]
    assert read("rounds/r0/prepare/metrics.json")["another_speaker"] == dropped


def test_too_many_bad_rows_stop_the_stage(tiny_params: MakeParams) -> None:
    sources = {"mine.jsonl": [*PAIRS[:18], pair(18, rejected=7), pair(19, margin=-1)]}
    reasons = r"mine\.jsonl:19: `rejected` is int.*mine\.jsonl:20: `margin` is -1"
    with pytest.raises(BadInput, match=rf"(?s)2 of 20 rows are bad.*{reasons}"):
        main(tiny_params(sources, max_bad_share=0.09), "r0")
    assert not Path("rounds").exists()


def test_a_held_out_copy_of_a_row_wins_and_a_shared_prompt_is_refused(
    tiny_params: MakeParams,
) -> None:
    main(tiny_params({"pairs.jsonl": PAIRS, "pairs_eval.jsonl": PAIRS[:2]}), "r0")
    assert len(rows_of("r0", "pairs_eval")) == 2 and len(rows_of("r0", "pairs_train")) == 18
    sources = {
        "pairs.jsonl": PAIRS,
        "pairs_eval.jsonl": [pair(5, chosen=" Quite another answer to it.")],
    }
    with pytest.raises(BadInput, match=r"held-out pairs_eval\.jsonl:1 and training pairs\.jsonl:6"):
        main(tiny_params(sources), "r0")


def test_shared_prompts_are_dropped_from_a_hub_data_set(tiny_params: MakeParams) -> None:
    params = tiny_params({})
    params.assets.data = "org/pairs"
    write_jsonl(Path("assets/data/train.jsonl"), PAIRS)
    write_jsonl(Path("assets/data/eval.jsonl"), [pair(5, chosen=" Quite another answer to it.")])
    main(params, "r0")
    assert len(rows_of("r0", "pairs_train")) == 19
    lost = read("rounds/r0/prepare/data/audit.json")["dropped"]["prompt is held out"]
    assert lost == [{"where": "assets/data/train.jsonl:6", "of": "assets/data/eval.jsonl:1"}]


TALE = "once upon a time there were two moons above a sea of glass and sand"


def test_a_leak_from_the_users_own_held_out_file_is_refused(tiny_params: MakeParams) -> None:
    sources = {
        "pairs.jsonl": [*PAIRS, pair(20, rejected=f" So: {TALE}")],
        "pairs_eval.jsonl": [pair(30, chosen=f" Hear: {TALE.upper()}!")],
    }
    leak = r"pairs\.jsonl:21 and held-out pairs_eval\.jsonl:1: “once upon .* of glass”"
    with pytest.raises(BadInput, match=rf"(?s)1 training rows.*{leak}"):
        main(tiny_params(sources), "r0")
    assert not Path("rounds").exists()


def test_leaks_between_the_sides_of_the_split_are_dropped_from_training(
    tiny_params: MakeParams,
) -> None:
    """Five responses contain the tale (few enough not to be boilerplate): if a held-out one has it,
    no training row does.
    """
    rows = [pair(i, chosen=f" Hear {i}: {TALE}") if i < 5 else pair(i) for i in range(20)]
    leaks = 0
    for seed in range(4):
        main(tiny_params({"mine.jsonl": rows}, seed=seed), "r0")
        held_out = [row for row in rows_of("r0", "pairs_eval") if TALE in row["chosen"]]
        train = [row for row in rows_of("r0", "pairs_train", "sft_train") if TALE in str(row)]
        lost = read("rounds/r0/prepare/data/audit.json")["dropped"].get("leak", [])
        assert bool(train) != bool(held_out)
        # a row dropped from pairs_train is dropped from sft_train too
        assert len(lost) == (2 * (5 - len(held_out)) if held_out else 0)
        assert len(lost) == read("rounds/r0/prepare/metrics.json")["leaks"]
        for row in lost:
            assert row["of"] in {row["id"] for row in held_out}
            assert row["shared"] == " ".join(TALE.split()[:13])
            assert row["set"] in ("pairs_train", "sft_train")
        leaks += len(lost)
    assert leaks


def test_ties_and_pairs_that_contradict_each_other_are_dropped(tiny_params: MakeParams) -> None:
    swapped = {**PAIRS[2], "chosen": PAIRS[2]["rejected"], "rejected": PAIRS[2]["chosen"]}
    rows = [
        *PAIRS,
        swapped,
        pair(20, margin=0),
        pair(21, chosen=" Rain.", rejected="Rain. "),
        pair(22, margin=1),
    ]
    main(tiny_params({"mine.jsonl": rows}), "r0")
    lost = read("rounds/r0/prepare/data/audit.json")["dropped"]
    assert [(row["where"], row["reason"]) for row in lost["tie"]] == [
        ("mine.jsonl:22", "`margin` is 0"),
        ("mine.jsonl:23", "chosen and rejected are the same"),
    ]
    locations = [("mine.jsonl:3", "mine.jsonl:21"), ("mine.jsonl:21", "mine.jsonl:3")]
    assert [(row["where"], row["of"]) for row in lost["contradiction"]] == locations
    kept = {row["id"]: row for row in rows_of("r0", "pairs_train", "pairs_eval")}
    assert len(kept) == 20
    assert kept["mine.jsonl:24"]["margin"] == 1.0 and "margin" not in kept["mine.jsonl:1"]


def test_prompts_that_are_nearly_equal_stay_on_one_side(tiny_params: MakeParams) -> None:
    """Ten prompts of 41 words, each three times with another last word: copies share 38 of 40
    3-grams, a similarity of 0.95.
    """
    texts = [" ".join(f"n{number}w{i}" for i in range(40)) for number in range(10)]
    rows = [
        {"prompt": f"{text} {last}", "chosen": f" yes {number} {last}", "rejected": " no"}
        for last in ("red", "green", "blue")
        for number, text in enumerate(texts)
    ]
    for seed in range(3):
        main(tiny_params({"mine.jsonl": rows}, seed=seed, max_prompt_tokens=999), "r0")
        sides = [
            {row["prompt"].split()[0] for row in rows_of("r0", f"pairs_{part}")}
            for part in ("train", "eval")
        ]
        assert not sides[0] & sides[1] and len(sides[1]) == 2
        assert read("rounds/r0/prepare/metrics.json")["leaks"] == 0


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"empty.jsonl": []}, r"no rows in"),
        (
            {
                "shown.jsonl": [
                    {"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS
                ]
            },
            "there are no preference pairs, .*set ppo.reward_weight to 0",
        ),
    ],
)
def test_sources_that_cannot_be_used(
    tiny_params: MakeParams, sources: dict[str, list[Row]], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        main(tiny_params(sources), "r0")


def test_a_missing_and_a_changed_file_are_named(tiny_params: MakeParams) -> None:
    params = tiny_params({"mine.jsonl": PAIRS})
    with Path("mine.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(BadInput, match=r"mine\.jsonl changed after the run began"):
        main(params, "r0")
    Path("mine.jsonl").unlink()
    inputs(params, "r0")
    with pytest.raises(BadInput, match=r"mine\.jsonl: expected a file"):
        main(params, "r0")


def pair_with(prompt: str, **columns: Any) -> Row:
    return {"prompt": prompt, "chosen": " good", "rejected": " bad"} | columns


def test_the_named_columns_reach_the_prompts(tiny_params: MakeParams) -> None:
    """A prompt has the first value of all rows with that prompt; None if there is none."""
    rows = [pair_with(f"Prompt number {n}", answer={"sum": n}, other=1) for n in range(20)]
    rows[3]["answer"] = None
    rows += [
        {"prompt": "Prompt number 3", "completion": " fine", "answer": "late"},
        {"prompt": "Prompt number 4", "completion": " fine", "answer": "second"},
        {"prompt": "Prompt number 5", "completion": " fine"},
        pair_with("Without an answer"),
        {"prompt": "Another demonstration", "completion": " fine"},
    ]
    main(tiny_params({"own.jsonl": rows}, columns=["answer"], eval_share=0.1), "r0")
    answers = {str(n): {"sum": n} for n in range(20)} | {"3": "late"}
    prompts = rows_of("r0", "prompts_train")
    assert len(prompts) > 15
    for row in prompts:
        assert row["columns"] == {"answer": answers.get(row["prompt"].split()[-1])}
    assert not any("columns" in row for row in rows_of("r0", "sft_train", "pairs_train", *EVAL))


def test_no_column_is_kept_unless_it_is_named(tiny_params: MakeParams) -> None:
    main(tiny_params({"own.jsonl": [pair_with(f"Prompt {n}", answer=n) for n in range(20)]}), "r0")
    assert all(row.keys() == {"id", "prompt", "source"} for row in rows_of("r0", "prompts_train"))


def test_what_is_not_used_is_named(
    tiny_params: MakeParams, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns without a reader, and a chat template beside conversations."""
    rows = [pair_with(f"Prompt {n}", answer=n, topic="sums") for n in range(20)]
    main(tiny_params({"own.jsonl": rows}, columns=["answer"]), "r0")
    audit = read("rounds/r0/prepare/data/audit.json")
    assert audit["ignored_columns"] == {"topic": 20}
    printed = capsys.readouterr().out
    assert "[prepare@r0] ignored columns: topic (" in printed and "conversations" not in printed

    talks = [
        {
            "prompt": [{"role": "user", "content": f"Prompt {n}"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        }
        for n in range(20)
    ]
    for prompt_format, is_named in (("plain", True), ("chat", False)):
        main(tiny_params({"own.jsonl": talks}, prompt_format=prompt_format), "r0")
        printed = capsys.readouterr().out
        assert ("20 rows are conversations, and the model's chat template is not" in printed) == (
            is_named
        )


def test_a_column_that_no_row_has_is_named(tiny_params: MakeParams) -> None:
    rows = [pair_with(f"Prompt {n}", answer=n) for n in range(20)]
    with pytest.raises(
        BadInput, match=r"prepare\.columns: no row of prepare\.sources has `anwser`"
    ):
        main(tiny_params({"own.jsonl": rows}, columns=["answer", "anwser"]), "r0")


def test_a_row_whose_column_json_does_not_have_is_bad(tiny_params: MakeParams) -> None:
    rows = [pair_with(f"Prompt {n}", answer=n) for n in range(20)]
    rows[7]["answer"] = math.nan
    main(tiny_params({"own.jsonl": rows}, columns=["answer"], max_bad_share=0.1), "r0")
    [[dropped]] = read("rounds/r0/prepare/data/audit.json")["dropped"].values()
    assert dropped["reason"] == "`answer` is nan; expected a value that JSON has"


def test_prompts_alone_unpaired_and_ranked_responses(tiny_params: MakeParams) -> None:
    """Each kind of row has its share of held-out prompts; a pair of two rows has both lines."""
    colours = ["red", "blue", "green", "grey", "pink"]
    topics = [f"{colour} {place}" for colour in colours for place in ("sea", "hill")]
    prompts = [{"prompt": f"Name a {topic}.", "n": number} for number, topic in enumerate(topics)]
    unpaired = [
        {"prompt": f"Draw the {topic}", "completion": f" with {text} {topic}", "label": is_good}
        for topic in topics
        for text, is_good in (("one nice", True), ("no", False))
    ]
    alone = {"prompt": "Only a bad one", "completion": " is here.", "label": False}
    ranked = [
        {"prompt": f"Sing of {topic}", "responses": [f" la {topic}", " do", " mi"], "ranks": ranks}
        for topic, ranks in zip(topics, [[1, 2, 3]] * 9 + [[1, 2, 2]], strict=True)
    ]
    files = {"prompts.jsonl": prompts, "kto.jsonl": [*unpaired, alone], "ranked.jsonl": ranked}
    main(tiny_params(files, columns=["n"], near_duplicate=1.0), "r0")
    counts = read("rounds/r0/prepare/metrics.json")
    audit = read("rounds/r0/prepare/data/audit.json")
    assert audit["by_cause"] == {"no response to compare with": 1, "tie": 1}
    assert (counts["rows_read"], counts["rows_bad"], counts["ties"]) == (41, 0, 1)
    assert counts["sft_train"] + counts["sft_eval"] == 10
    pairs = [*rows_of("r0", "pairs_train"), *rows_of("r0", "pairs_eval")]
    assert len(pairs) == 10 + 27 + 2
    first = next(row for row in pairs if row["id"] == "kto.jsonl:1-2")
    assert (first["chosen"], first["rejected"]) == (" with one nice red sea", " with no red sea")
    assert {"ranked.jsonl:1.1", "ranked.jsonl:1.2", "ranked.jsonl:1.3"} <= {r["id"] for r in pairs}
    held_out = [row["id"] for row in rows_of("r0", "eval_prompts")]
    trained = {row["id"]: row for row in rows_of("r0", "prompts_train")}
    for name in files:
        assert any(one.startswith(name) for one in held_out), name
    assert trained.keys() >= {"prompts.jsonl:1"} or "prompts.jsonl:1" in held_out
    assert all(row["columns"]["n"] is not None for id_, row in trained.items() if "prompts" in id_)
