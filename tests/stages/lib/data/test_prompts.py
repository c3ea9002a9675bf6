"""Rendering and encoding of prompts.

The tiny tokenizer was not trained on `Z` and `Q`, so each is one token.
"""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from stages.assets.base_model import tiny_model
from stages.lib.core.errors import BadInput
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.prompts import (
    PromptRefused,
    check_template,
    decode,
    encode,
    render_prompt,
    template_hash,
    text_with_bos,
)
from stages.prepare.audit import text_lengths
from tests.tokenizers import make_boundary_tokenizer

PLAIN, CHAT = PromptFormat.plain, PromptFormat.chat
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_model(0)[1]


def test_plain_text_is_itself(tokenizer: Any) -> None:
    assert render_prompt(tokenizer, "The dinner was", PLAIN) == "The dinner was"


def test_messages_under_plain_are_a_transcript(tokenizer: Any) -> None:
    assert (
        render_prompt(tokenizer, TALK, PLAIN)
        == "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye\n\nAssistant:"
    )


def test_text_under_chat_is_one_user_message(tokenizer: Any) -> None:
    assert (
        render_prompt(tokenizer, "Hi", CHAT)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_under_chat_go_through_the_template(tokenizer: Any) -> None:
    assert render_prompt(tokenizer, TALK, CHAT) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_without_a_template_is_refused() -> None:
    tokenizer = tiny_model(0)[1]
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="chat template"):
        render_prompt(tokenizer, "Hi", CHAT)


def test_encode_appends_eos_to_the_response_only(tokenizer: Any) -> None:
    z, q = tokenizer.convert_tokens_to_ids(["Z", "Q"])
    assert encode(tokenizer, "ZZ", "QQQ", PLAIN) == ([z, z], [q, q, q, tokenizer.eos_token_id])
    assert encode(tokenizer, "ZZ", None, PLAIN) == ([z, z], [])


@pytest.mark.parametrize(
    ("prompt", "response", "kept_prompt", "kept_response"),
    [
        (5, 6, 5, 7),  # 5 + 6 + eos = 12: fits
        (8, 6, 8, 4),  # the response is cut: 12 - 8
        (20, 6, 9, 3),  # the response gets a quarter, 3; the prompt keeps its last 9
        (20, 1, 10, 2),  # the response needs only 2
        (20, None, 12, 0),
    ],
)
def test_encode_cuts_to_max_length_12(
    tokenizer: Any,
    prompt: int,
    response: int | None,
    kept_prompt: int,
    kept_response: int,
) -> None:
    z, q = tokenizer.convert_tokens_to_ids(["Z", "Q"])
    prompt_ids, response_ids = encode(
        tokenizer, "Q" + "Z" * (prompt - 1), None if response is None else "Q" * response, PLAIN, 12
    )
    assert (len(prompt_ids), len(response_ids)) == (kept_prompt, kept_response)
    assert prompt_ids[-1] == z and (prompt_ids[0] == q) == (
        kept_prompt == prompt
    )  # cut on the left
    assert response is None or response_ids[-1] == tokenizer.eos_token_id


def test_prompts_begin_with_bos_if_the_tokenizer_begins_texts_with_it(bos_tokenizer: Any) -> None:
    with_bos = bos_tokenizer("The dinner was").input_ids
    assert with_bos[0] == bos_tokenizer.bos_token_id
    response = bos_tokenizer(" good", add_special_tokens=False).input_ids
    expected = (with_bos, [*response, bos_tokenizer.eos_token_id])
    assert encode(bos_tokenizer, "The dinner was", " good", PLAIN) == expected
    assert list(text_lengths(["The dinner was"], bos_tokenizer)) == [len(with_bos)]
    assert text_with_bos(bos_tokenizer, "The dinner was") == "<|begin|>The dinner was"


@pytest.mark.parametrize("rendered_by_the_template", [False, True])
def test_chat_prompts_have_exactly_one_bos(
    bos_tokenizer: Any, rendered_by_the_template: bool
) -> None:
    tokenizer = copy.deepcopy(bos_tokenizer)
    if rendered_by_the_template:
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    rendered = render_prompt(bos_tokenizer, "Hi", CHAT)
    prompt_ids, _ = encode(tokenizer, "Hi", None, CHAT)
    assert prompt_ids == bos_tokenizer(rendered).input_ids
    assert prompt_ids.count(tokenizer.bos_token_id) == 1
    assert text_with_bos(tokenizer, render_prompt(tokenizer, "Hi", CHAT)) == "<|begin|>" + rendered


def test_a_cut_prompt_keeps_its_bos(bos_tokenizer: Any) -> None:
    bos, z = bos_tokenizer.bos_token_id, bos_tokenizer.convert_tokens_to_ids("Z")
    prompt_ids, response_ids = encode(bos_tokenizer, "Q" + "Z" * 20, "QQQQQQ", PLAIN, 12)
    assert (prompt_ids, len(response_ids)) == ([bos, *[z] * 8], 3)
    assert encode(bos_tokenizer, "Z" * 11, None, PLAIN, 12)[0] == [bos, *[z] * 11]


def test_a_tokenizer_that_does_not_begin_texts_with_its_bos_adds_none(tokenizer: Any) -> None:
    assert tokenizer.bos_token == "<|im_start|>"
    ids = tokenizer("The dinner was", add_special_tokens=False).input_ids
    assert encode(tokenizer, "The dinner was", None, PLAIN) == (ids, [])
    assert text_with_bos(tokenizer, "The dinner was") == "The dinner was"


@pytest.fixture(scope="module", params=["normalizer", "first", "always"])
def boundary_tokenizer(request: pytest.FixtureRequest) -> Any:
    return make_boundary_tokenizer(request.param)


@pytest.mark.parametrize(
    ("prompt", "response", "prompt_format"),
    [
        ("The dinner", " was good.", PLAIN),
        ("The dinner", "  was", PLAIN),
        ("The dinner", "\n\n was", PLAIN),
        ("晚饭", "很好。", PLAIN),
        ("The dinner", "", PLAIN),
        ("How was the dinner?", "It was good.", CHAT),
        (TALK, " Bye.", CHAT),
    ],
)
def test_a_response_has_the_tokens_and_the_text_that_continue_its_prompt(
    boundary_tokenizer: Any, prompt: Any, response: str, prompt_format: PromptFormat
) -> None:
    """Expected are the tokens of the whole text, which has one word boundary, at its start."""
    tokenizer = boundary_tokenizer
    prompt_ids, response_ids = encode(tokenizer, prompt, response, prompt_format)
    whole = render_prompt(tokenizer, prompt, prompt_format) + response
    assert [*prompt_ids, *response_ids] == [*tokenizer(whole).input_ids, tokenizer.eos_token_id]
    assert decode(tokenizer, [response_ids, response_ids[:-1]]) == [response, response]


def test_a_response_within_a_word_gets_no_word_boundary(boundary_tokenizer: Any) -> None:
    prompt_ids, response_ids = encode(boundary_tokenizer, "The dinner was go", "od.", PLAIN)
    o, d = boundary_tokenizer.convert_tokens_to_ids(["o", "d."])
    assert response_ids == [o, d, boundary_tokenizer.eos_token_id]
    whole = boundary_tokenizer.decode(prompt_ids + response_ids, skip_special_tokens=True)
    assert whole == "The dinner was good."


def test_a_line_break_that_is_merged_is_not_put_before_responses() -> None:
    """As if the vocabulary had `\\n\\n`, which Llama's lacks."""
    tokenizer = make_boundary_tokenizer("first")
    tokenizer.add_tokens(["\n\n"])
    _, response_ids = encode(tokenizer, "The dinner", "\n was", PLAIN)
    assert tokenizer.convert_ids_to_tokens(response_ids) == ["<0x0A>", "▁was", "</s>"]


def test_bytes_that_are_no_text_are_decoded_alone(boundary_tokenizer: Any) -> None:
    ids = boundary_tokenizer.convert_tokens_to_ids(["<0xE5>", "<0xBE>"])
    assert decode(boundary_tokenizer, [ids, []]) == ["\ufffd\ufffd", ""]
    assert decode(boundary_tokenizer, []) == []


# How GPT-2 and Llama 3 split texts into words
WORDS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("words", WORDS)
def test_byte_level_tokenizers_encode_and_decode_responses_as_they_are(words: str) -> None:
    tokenizer, draw = tiny_model(0)[1], random.Random(0)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS[words]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = [" ", "\n", "\n\n", "  ", "The", " was", "good", ".", "'s", "12", "很", "<|im_end|>"]
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=draw.randrange(6)))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert encode(tokenizer, "The day", text, PLAIN)[1] == [*ids, tokenizer.eos_token_id]
        sampled = draw.choices(range(len(tokenizer)), k=draw.randrange(6))
        alone = tokenizer.batch_decode([ids, sampled], skip_special_tokens=True)
        assert decode(tokenizer, [ids, sampled]) == alone


def test_no_other_code_decodes_responses() -> None:
    files = [file for folder in ("stages", "flows") for file in Path(folder).rglob("*.py")]
    decoding = [file for file in files if "batch_decode(" in file.read_text(encoding="utf-8")]
    assert decoding == [Path("stages/lib/data/prompts.py")]


def test_template_hash_depends_on_format_and_template(tokenizer: Any) -> None:
    other = tiny_model(0)[1]
    other.chat_template = other.chat_template.replace("assistant", "bot")
    hashes = {
        template_hash(tokenizer, PLAIN),
        template_hash(tokenizer, CHAT),
        template_hash(other, CHAT),
    }
    assert len(hashes) == 3
    assert template_hash(tiny_model(1)[1], CHAT) == template_hash(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("date_format", "printed"),
    [
        ("%d %b %Y", "26 Jul 2024"),  # Llama 3.2
        ("%Y-%m-%d", "2024-07-26"),  # Mistral Small 3
        ("%B %d, %Y", "July 26, 2024"),  # Granite 3
        ("%A, %-d %B, %H:%M", "Friday, 26 July, 00:00"),
    ],
)
def test_today_is_the_same_day_in_all_stages(date_format: str, printed: str) -> None:
    tokenizer = tiny_model(0)[1]
    template = (
        "\n  {% if strftime_now is defined %}\n{% set today = strftime_now('DATE') %}{% endif %}\n"
        "{% macro date() %}{{ strftime_now('DATE') }}{% endmacro %}{{ today ~ '/' ~ date() }}|"
        "{{ messages[-1].content }}"
    ).replace("DATE", date_format)
    # spaces before a block and the line break after it are no text
    expected = f"\n{printed}/{printed}|Hi"
    for tokenizer.chat_template in (template, {"default": template, "tool_use": "{{ 1 / 0 }}"}):
        assert render_prompt(tokenizer, "Hi", CHAT) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('No system turns') }}", "No system turns"),
        ("{{ messages[0].thoughts.strip() }}", "no attribute 'thoughts'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{% for message in messages %}", "Unexpected end of template"),
        ({"chat": "", "tool_use": ""}, "no default specified"),
    ],
)
def test_a_prompt_that_a_template_cannot_render_is_named(template: Any, reason: str) -> None:
    tokenizer = tiny_model(0)[1]
    tokenizer.chat_template, tokenizer.name_or_path = template, "assets/model"
    with pytest.raises(
        PromptRefused, match=rf"assets/model cannot render the prompt Hi: .*{reason}"
    ):
        render_prompt(tokenizer, "Hi", CHAT)
    with pytest.raises(PromptRefused):
        template_hash(tokenizer, CHAT)
    template_hash(tokenizer, PLAIN)


def test_a_template_that_leaves_the_prompt_out_is_refused() -> None:
    tokenizer = tiny_model(0)[1]
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(BadInput, match="leaves out the user's last turn"):
        template_hash(tokenizer, CHAT)


def test_check_template_refuses_another_rendering(tokenizer: Any, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"template_hash": template_hash(tokenizer, PLAIN)}))
    check_template(manifest, tokenizer, PLAIN)
    with pytest.raises(BadInput, match="template_hash"):
        check_template(manifest, tokenizer, CHAT)
