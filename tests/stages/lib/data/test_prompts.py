"""Rendering and encoding of prompts.

The tiny tokenizer was not trained on `Z` and `Q`, so each is one token.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from stages.assets.base_model import tiny_model
from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import PrepareParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.prompts import (
    check_template,
    encode,
    render_prompt,
    template_hash,
    text_with_bos,
)
from stages.prepare.audit import prompt_lengths

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
    assert list(prompt_lengths(["The dinner was"], bos_tokenizer, PrepareParams())) == [
        len(with_bos)
    ]
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


def test_check_template_refuses_another_rendering(tokenizer: Any, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"template_hash": template_hash(tokenizer, PLAIN)}))
    check_template(manifest, tokenizer, PLAIN)
    with pytest.raises(BadInput, match="template_hash"):
        check_template(manifest, tokenizer, CHAT)
