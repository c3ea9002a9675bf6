"""Every form of rows, with values written by hand; files of every type; rows that are refused."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import SourceParams
from stages.lib.core.params.shared import PromptFormat
from stages.prepare.files import read_source
from stages.prepare.formats import FORMATS, REFUSED, find_form, table
from stages.prepare.turns import Defect, Tie
from tests.paths import ROOT
from tests.stages.prepare.rows import become, becomes

CHAT = PromptFormat.chat
USER = {"role": "user", "content": "Sky?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [USER, {"role": "assistant", "content": "Up."}, {"role": "user", "content": "Colour?"}]
BLUE = {"role": "assistant", "content": "Blue."}
RED = {"role": "assistant", "content": "Red."}
PAIR = {"prompt": [USER], "chosen": "Blue.", "rejected": "Red."}
TALK_PAIR = {**PAIR, "prompt": TALK}
DEMONSTRATION = {"prompt": [USER], "completion": "Blue."}
HUMAN = {"from": "human", "value": "Sky?"}
BOTH = {"chosen": "Blue.", "rejected": "Red."}
THREE = [
    {**PAIR, "chosen": chosen, "rejected": rejected}
    for chosen, rejected in (("Blue.", "Red."), ("Blue.", "Green."), ("Green.", "Red."))
]


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


CASES: list[tuple[str, list[Any], list[dict[str, Any]]]] = [
    (
        "TRL unpaired",
        [
            {"prompt": "Sky?", "completion": "Red.", "label": False},
            {"prompt": "Sky?", "completion": "Blue.", "label": True},
        ],
        [DEMONSTRATION, PAIR],
    ),
    (
        "KTO of LLaMA-Factory",
        [
            {"messages": [USER, BLUE], "label": True},
            {"messages": [USER, RED], "label": False},
        ],
        [DEMONSTRATION, PAIR],
    ),
    (
        "KTO of LLaMA-Factory",
        [{"conversations": [HUMAN, gpt("Blue.")], "kto_tag": True, "system": "Be brief."}],
        [{**DEMONSTRATION, "prompt": [SYSTEM, USER]}],
    ),
    (
        "ShareGPT DPO (LLaMA-Factory)",
        [{"conversations": [HUMAN], "chosen": gpt("Blue."), "rejected": gpt("Red.")}],
        [PAIR],
    ),
    ("ShareGPT DPO (LLaMA-Factory)", [{"conversations": [HUMAN], **BOTH}], [PAIR]),
    ("Axolotl DPO", [{"messages": TALK, "chosen": BLUE, "rejected": RED}], [TALK_PAIR]),
    ("Axolotl DPO, `conversation`", [{"conversation": TALK, **BOTH}], [TALK_PAIR]),
    (
        "Alpaca DPO, Orca DPO",
        [{"instruction": "Say it.", "input": "Sky?", **BOTH, "history": [["Hi", "Hello"]]}],
        [
            {
                **PAIR,
                "prompt": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"},
                    {"role": "user", "content": "Say it.\n\nSky?"},
                ],
            }
        ],
    ),
    (
        "Alpaca DPO, Orca DPO",
        [{"system": "Be brief.", "question": "Sky?", **BOTH}],
        [{**PAIR, "prompt": [SYSTEM, USER]}],
    ),
    (
        "Argilla, NeMo DPO",
        [{"prompt": "Sky?", "chosen_response": "Blue.", "rejected_response": "Red."}],
        [PAIR],
    ),
    (
        "ms-swift DPO",
        [{"messages": [SYSTEM, USER, BLUE], "rejected_response": "Red."}],
        [{**PAIR, "prompt": [SYSTEM, USER]}],
    ),
    (
        "ms-swift DPO",
        [{"query": "Sky?", "response": "Blue.", "rejected_response": "Red."}],
        [PAIR],
    ),
    (
        "OpenAI preferences",
        [
            {
                "input": {"messages": [{**SYSTEM, "role": "developer"}, USER], "tools": []},
                "preferred_output": [BLUE],
                "non_preferred_output": [RED],
            }
        ],
        [{**PAIR, "prompt": [SYSTEM, USER]}],
    ),
    (
        "NeMo RL preferences",
        [
            {
                "context": TALK,
                "completions": [
                    {"rank": 1, "completion": [RED]},
                    {"rank": 0, "completion": [BLUE]},
                ],
            }
        ],
        [TALK_PAIR],
    ),
    (
        "UltraFeedback",
        [
            {
                "instruction": "Sky?",
                "completions": [
                    {"response": "Blue.", "overall_score": 9.0},
                    {"response": "Red.", "overall_score": 2},
                    {"response": "Green.", "overall_score": 5.0},
                ],
            }
        ],
        [THREE[0], THREE[1], THREE[2]],
    ),
    (
        "Nectar",
        [
            {
                "prompt": "\n\nHuman: Sky?\n\nAssistant: ",
                "answers": [
                    {"answer": "Blue.", "rank": 1.0, "model": "a"},
                    {"answer": "Red.", "rank": 3.0, "model": "b"},
                    {"answer": "Green.", "rank": 2.0, "model": "c"},
                ],
            }
        ],
        [THREE[0], THREE[1], THREE[2]],
    ),
    ("ranked list", [{"prompt": "Sky?", "responses": ["Red.", "Blue."], "ranks": [2, 1]}], [PAIR]),
    (
        "ranked list",
        [{"question": "Sky?", "responses": ["Red.", "Blue."], "scores": [2, 3.5]}],
        [PAIR],
    ),
    (
        "HelpSteer 3",
        [
            {
                "context": TALK,
                "response1": "Blue.",
                "response2": "Red.",
                "overall_preference": -2,
                "domain": "general",
            }
        ],
        [TALK_PAIR],
    ),
    (
        "HelpSteer 2, preferences",
        [
            {
                "prompt": "Sky?",
                "response_1": "Red.",
                "response_2": "Blue.",
                "preference_strength": 1,
            },
            {
                "prompt": "Sky?\n<extra_id_1>Assistant\nUp.\n<extra_id_1>User\nColour?",
                "response_1": "Blue.",
                "response_2": "Red.",
                "preference_strength": -3,
            },
        ],
        [PAIR, TALK_PAIR],
    ),
    (
        "HelpSteer 1 and 2",
        [
            {"prompt": "Sky?", "response": "Red.", "helpfulness": 1, "verbosity": 4},
            {"prompt": "Sky?", "response": "Blue.", "helpfulness": 3, "verbosity": 1},
        ],
        [PAIR],
    ),
    (
        "SHP",
        [{"history": "Sky?", "human_ref_A": "Red.", "human_ref_B": "Blue.", "labels": 0}],
        [PAIR],
    ),
    (
        "PKU-SafeRLHF",
        [
            {
                "prompt": "Sky?",
                "response_0": "Red.",
                "response_1": "Blue.",
                "better_response_id": 1,
                "safer_response_id": 0,
            }
        ],
        [PAIR],
    ),
    (
        "OASST, trees",
        [
            {
                "message_tree_id": "t",
                "prompt": {
                    "text": "Sky?",
                    "role": "prompter",
                    "replies": [
                        {
                            "text": "Up.",
                            "role": "assistant",
                            "rank": None,
                            "replies": [
                                {
                                    "text": "Colour?",
                                    "role": "prompter",
                                    "replies": [
                                        {"text": "Red.", "role": "assistant", "rank": 1},
                                        {"text": "Blue.", "role": "assistant", "rank": 0},
                                    ],
                                }
                            ],
                        }
                    ],
                },
            }
        ],
        [TALK_PAIR],
    ),
    (
        "WebGPT",
        [
            {
                "question": {"full_text": "Sky?"},
                "answer_0": "Red.",
                "answer_1": "Blue.",
                "score_0": -0.5,
                "score_1": 0.5,
            }
        ],
        [PAIR],
    ),
    (
        "summarize-from-feedback",
        [
            {
                "info": {"subreddit": "sky", "title": "Sky?", "post": "It is up."},
                "summaries": [{"text": " Red."}, {"text": "Blue."}],
                "choice": 1,
            }
        ],
        [
            {
                **PAIR,
                "prompt": [
                    {
                        "role": "user",
                        "content": "SUBREDDIT: r/sky\nTITLE: Sky?\nPOST: It is up.\nTL;DR:",
                    }
                ],
            }
        ],
    ),
    (
        "Chatbot Arena, MT-Bench",
        [{"conversation_a": [USER, RED], "conversation_b": [USER, BLUE], "winner": "model_b"}],
        [PAIR],
    ),
    (
        "LMSYS 55k",
        [
            {
                "prompt": '["Sky?"]',
                "response_a": '["Red."]',
                "response_b": '["Blue."]',
                "winner_model_a": 0,
                "winner_model_b": 1,
                "winner_tie": 0,
            }
        ],
        [PAIR],
    ),
    (
        "AlpacaFarm",
        [{"instruction": "Sky?", "output_1": "Red.", "output_2": "Blue.", "preference": 2}],
        [PAIR],
    ),
    ("LLMBar", [{"input": "Sky?", "output_1": "Blue.", "output_2": "Red.", "label": 1}], [PAIR]),
    (
        "Label Studio, export",
        [
            {
                "data": {"prompt": "Sky?", "answer1": "Red.", "answer2": "Blue."},
                "annotations": [{"result": [{"type": "pairwise", "value": {"selected": "right"}}]}],
            }
        ],
        [PAIR],
    ),
    (
        "Label Studio, JSON-MIN",
        [{"prompt": "Sky?", "answer1": "Blue.", "answer2": "Red.", "comparison": "left"}],
        [PAIR],
    ),
    (
        "Anthropic hh-rlhf, DeepSpeed-Chat",
        [
            {
                "chosen": "Human: Sky?\n\nAssistant: Blue.",
                "rejected": "Human: Sky?\n\nAssistant: Red.",
            }
        ],
        [PAIR],
    ),
    (
        "TRL preference, explicit prompt",
        [{"system_prompt": "Be brief.", "prompt": "Sky?", **BOTH}],
        [{**PAIR, "prompt": [SYSTEM, USER]}],
    ),
    (
        "TRL preference, implicit prompt",
        [{"chosen": [*TALK, BLUE], "rejected": [*TALK, RED]}],
        [TALK_PAIR],
    ),
    (
        "rated responses",
        [
            {"prompt": "Sky?", "completion": "Red.", "rating": 0.5},
            {"prompt": "Sky?", "completion": "Blue.", "rating": 4},
            {"prompt": "Sky?", "completion": "Green.", "rating": 2},
        ],
        [THREE[0], THREE[2], THREE[1]],
    ),
    ("TRL prompt-completion", [{"prompt": "Sky?", "completion": [BLUE]}], [DEMONSTRATION]),
    ("prompt and response", [{"prompt": "Sky?", "response": "Blue."}], [DEMONSTRATION]),
    ("Alpaca", [{"instruction": "Sky?", "input": "", "output": "Blue."}], [DEMONSTRATION]),
    ("ms-swift `query`, `response`", [{"query": "Sky?", "response": "Blue."}], [DEMONSTRATION]),
    ("question and answer (GSM8K)", [{"question": "Sky?", "answer": "Blue."}], [DEMONSTRATION]),
    (
        "messages (TRL, OpenAI, ShareGPT, Firefly, XTuner)",
        [
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]},
                ]
            },
            {"conversations": [HUMAN, gpt("Blue.")]},
            {"conversation": [{"human": "Sky?", "assistant": "Blue."}]},
            {"conversation": [{"system": "Be brief.", "input": "Sky?", "output": "Blue."}]},
        ],
        [*[DEMONSTRATION] * 3, {**DEMONSTRATION, "prompt": [SYSTEM, USER]}],
    ),
    (
        "verl",
        [{"prompt": [USER], "reward_model": {"ground_truth": "blue"}, "ability": "colour"}],
        [{"prompt": [USER]}],
    ),
    ("TRL prompt-only, OpenRLHF", [{"prompt": "Sky?", "label": "blue"}], [{"prompt": [USER]}]),
]


@pytest.mark.parametrize(("name", "raws", "expected"), CASES)
def test_what_becomes_of_each_form(
    name: str, raws: list[Any], expected: list[dict[str, Any]]
) -> None:
    assert {find_form(raw)[0].name for raw in raws} == {name}
    assert become(raws, CHAT) == expected


def test_each_form_is_tried_and_documented() -> None:
    """The table of docs/data.md is printed by `python -m stages.prepare.formats`."""
    tried = {name for name, _, _ in CASES}
    assert {form.name for form in FORMATS if form.becomes != REFUSED} == tried
    assert table() in (ROOT / "docs/data.md").read_text()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (
            {"messages": [USER, {**BLUE, "tool_calls": [{"id": 1}]}]},
            "message 2 .* has `tool_calls`",
        ),
        ({"messages": [USER, {"role": "tool", "content": "3"}, BLUE]}, "role 'tool'"),
        ({"conversations": [HUMAN, {"from": "observation", "value": "3"}]}, "role 'observation'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, BLUE]},
            "message 1 .* it has image",
        ),
        ({"messages": [USER, {**BLUE, "weight": 0}]}, "message 2 .* not to be trained on"),
        ({"messages": [USER, {**BLUE, "reasoning_content": "Hm."}]}, "`reasoning_content`"),
        ({"messages": [USER]}, "`messages` does not end with an assistant turn"),
        ({"prompt": "Sky?", "response": "Blue.", "score": 3}, "`score` may say how good"),
        ({"question": "Sky?", "answer": "A", "choices": ["Blue.", "Red."]}, "unknown form"),
        ({"instruction": "Sky?", "context": "It is up.", "response": "Blue."}, "`context` would"),
        ({"question": "Sky?", "input": "Up?", **BOTH}, "there are `question`, `input`"),
        ({"prompt": "Sky?", "responses": ["a", "b", "c"], "ranking": [2, 0, 1]}, "may be the"),
        ({"prompt": "Sky?", "responses": ["a", "b", "c"], "ranks": [2, 1]}, "3 `responses` and 2"),
        ({"message_id": "1", "message_tree_id": "2", "text": "Hi"}, "the file of trees"),
        (
            {"prompt": [USER], "completion": "<start_of_turn>user"},
            "the role marker <start_of_turn>",
        ),
        ({"info": {"article": "x"}, "summaries": [], "choice": 0}, "news articles"),
        ({"instruction": "Sky?", "completions": ["Blue."]}, "not as in UltraFeedback: "),
        (
            {
                "prompt": '["a", "b"]',
                "response_a": "c",
                "response_b": "d",
                "winner_model_a": 1,
                "winner_model_b": 0,
            },
            "`prompt` has 2 turns",
        ),
        (
            {"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 7},
            "`better_response_id` is 7; expected 0, 1",
        ),
        ({"prompt": "a", "system": {"text": "b"}, **BOTH}, "`system` is dict; expected text"),
        ({"prompt": "a", "history": ["b", "c"], **BOTH}, "expected a role and a content, got str"),
    ],
)
def test_what_would_be_lost_or_guessed_is_refused(raw: Any, reason: str) -> None:
    with pytest.raises(Defect, match=reason) as caught:
        becomes(raw, CHAT)
    assert not isinstance(caught.value, Tie)


@pytest.mark.parametrize(
    "raw",
    [
        {"conversation_a": [USER, RED], "conversation_b": [USER, BLUE], "winner": "tie (bothbad)"},
        {"prompt": "a", "response_1": "b", "response_2": "c", "preference_strength": 0},
        {"prompt": "Sky?", "responses": ["a", "b"], "scores": [1, 1.0]},
        {"question": "a", "answer_0": "b", "answer_1": "c", "score_0": 0, "score_1": 0},
        {
            "data": {"prompt": "a", "answer1": "b", "answer2": "c"},
            "annotations": [
                {"result": [{"type": "pairwise", "value": {"selected": side}}]}
                for side in ("left", "right")
            ],
        },
    ],
)
def test_ties_have_no_better_response(raw: Any) -> None:
    with pytest.raises(Tie):
        becomes(raw, CHAT)


def test_a_rating_says_nothing_without_another_response() -> None:
    with pytest.raises(Defect, match="no other response to its prompt"):
        becomes({"prompt": "Sky?", "completion": "Red.", "label": False}, CHAT)
    with pytest.raises(Tie, match="the same rating"):
        become([{"prompt": "Sky?", "completion": text, "rating": 1} for text in "ab"], CHAT)


def test_columns_by_hand() -> None:
    raw = {"q": "Sky?", "answers": {"good": "Blue.", "bad": "Red."}, "label": 3}
    names = {"prompt": "q", "chosen": "answers.good", "rejected": "answers.bad"}
    assert becomes(raw, CHAT, names=names) == PAIR
    with pytest.raises(Defect, match=r"no `answers\.best`, which the source's `columns` names as"):
        becomes(raw, CHAT, names={**names, "chosen": "answers.best"})


ROWS = [{"prompt": f"p {i}", "chosen": f"c, {i}\n“x”", "rejected": f"r {i}"} for i in range(4)]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table_text(separator: str) -> str:
    rows = [
        separator.join(ROWS[0]),
        *(separator.join(f'"{x}"' for x in row.values()) for row in ROWS),
    ]
    return "\ufeff" + "\r\n".join(rows) + "\r\n"


@pytest.mark.parametrize(
    ("name", "content", "first"),
    [
        ("a.ndjson", lines(ROWS).encode(), 1),
        ("a.json", lines(ROWS).encode(), 1),
        ("a.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=1).encode(), 1),
        ("a.jsonl", json.dumps(ROWS).encode(), 1),
        ("a.jsonl.gz", lines(ROWS).encode(), 1),
        ("a.csv", table_text(",").encode(), 3),
        ("a.tsv", table_text("\t").encode(), 3),
        ("a.csv.gz", table_text(",").encode(), 3),
    ],
)
def test_files_of_every_type(tmp_path: Path, name: str, content: bytes, first: int) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    located = list(read_source(SourceParams(path=str(path)), None))
    assert [row for _, row in located] == ROWS
    assert located[0][0] == f"{path}:{first}" and len({where for where, _ in located}) == 4


def test_zst_parquet_folders_and_saved_data_sets(tmp_path: Path) -> None:
    def read(path: Path, split: str = "train") -> list[Any]:
        return [row for _, row in read_source(SourceParams(path=str(path), split=split), None)]

    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as stream:
        stream.write(lines(ROWS).encode())
    assert read(tmp_path / "a.jsonl.zst") == ROWS
    (tmp_path / "cut.jsonl.zst").write_bytes((tmp_path / "a.jsonl.zst").read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"cut\.jsonl\.zst.*: damaged"):
        read(tmp_path / "cut.jsonl.zst")
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    parquet = pyarrow.Table.from_pylist(ROWS[:1])
    pyarrow.parquet.write_table(parquet, folder / "data/train-00000-of-00001.parquet")
    (folder / "data/validation.jsonl").write_text(lines(ROWS[1:3]))
    (folder / "README.md").write_text("A data set.")
    assert (read(folder), read(folder, "validation")) == (ROWS[:1], ROWS[1:3])
    with pytest.raises(BadInput, match=r"split test; found train \(1 files\), validation \(1 f"):
        read(folder, "test")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == read(tmp_path / "two", "test") == ROWS
    with pytest.raises(BadInput, match="no split train; found test"):
        read(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", b"prompt,chosen\n\xe9,b\n", "not UTF-8: byte 0xe9 in line 2"),
        ("a.csv", b"prompt,prompt\na,b\n", "two columns have the name 'prompt'"),
        ("a.csv", b'prompt,chosen\n"a"b,c\n', "a.csv:2: not CSV"),
        ("a.json", b'{\n "rows": [\n {"prompt": "a"}]}', "one JSON object, with the keys rows"),
        ("a.json", b'[{"prompt": "a"}', "not a JSON array"),
        ("a.jsonl.gz", b"text", "damaged"),
        ("a.txt", b"text", "expected a file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=reason):
        list(read_source(SourceParams(path=str(path)), None))


def test_a_short_table_limits_no_other_reader_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\na\n")
    list(read_source(SourceParams(path=str(tmp_path / "a.csv")), None))
    assert next(csv.reader(["x" * 1000])) == ["x" * 1000]


def test_cells_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\n7,true,True\na,b,0\nonly\n")
    rows = [row for _, row in read_source(SourceParams(path=str(path)), None)]
    assert rows[:2] == [
        {"prompt": "7", "completion": "true", "label": True},
        {"prompt": "a", "completion": "b", "label": 0},
    ]
    assert isinstance(rows[2], Defect)
