"""The tokenizer of assets/model: what ends a turn, the template's arguments, and the pad."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from docs.bench.families import CHATS, params_of, tokenizer_of
from stages.assets.base_model import save, tiny_model, tiny_tokenizer, write_model
from stages.assets.tokenizer import is_spare
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.data.prompts import chat_template, encode, render_prompt, template_hash
from stages.lib.lm.end_tokens import saved_end_tokens

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "\n{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
]


def written(folder: Path, template: str, added: list[str], **prepare: Any) -> Any:
    """The tokenizer that assets writes of a model with these tokens; its EOS is `<eos>`."""
    model, tokenizer = tiny_model(0)
    tokenizer.add_special_tokens({"eos_token": "<eos>", "extra_special_tokens": added})
    tokenizer.chat_template = template
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "mine")
    tokenizer.save_pretrained(folder / "mine")
    data = {"assets": {"model": str(folder / "mine"), "data": "tiny"}, "prepare": prepare}
    params: Params = check_params(data, "test")
    write_model(params, folder / "out")
    return AutoTokenizer.from_pretrained(folder / "out")


@pytest.mark.parametrize(
    ("template", "added", "end"),
    [
        (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
        (PHI, ["<|user|>", "<|end|>", "<|assistant|>"], "<|end|>"),
        (GEMMA.replace("<end_of_turn>", "{{ eos_token }}"), ["<start_of_turn>"], "<eos>"),
    ],
    ids=["gemma3", "phi3", "eos"],
)
def test_a_response_ends_as_the_chat_template_ends_a_turn(
    tmp_path: Path, template: str, added: list[str], end: str
) -> None:
    tokenizer = written(tmp_path, template, added, prompt_format="chat")
    _, response = encode(tokenizer, TALK, "Well.", PromptFormat.chat)
    assert tokenizer.decode(response) == "Well." + end
    ends = saved_end_tokens(tmp_path / "out", tokenizer)
    assert tokenizer.convert_ids_to_tokens(ends.eos) == end
    assert set(tokenizer.convert_ids_to_tokens(ends.ids)) >= {end, "<eos>"}
    assert tokenizer.pad_token_id not in ends.ids
    before = AutoTokenizer.from_pretrained(tmp_path / "mine")
    for prompt in (TALK, "Hi"):
        rendered = render_prompt(tokenizer, prompt, PromptFormat.chat)
        assert rendered == render_prompt(before, prompt, PromptFormat.chat)
    assert ("<eos>" in render_prompt(tokenizer, TALK, PromptFormat.chat)) == (
        "eos_token" in template
    )


@pytest.mark.parametrize("name", CHATS)
def test_prompt_and_response_are_the_conversation_as_its_family_writes_it(
    name: str, tmp_path: Path
) -> None:
    """By the families' own templates: a turn begins and ends as in them."""
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    model, tokenizer = tiny_model(0)[0], tokenizer_of(name)
    params = params_of(name, tmp_path, {})
    arguments = params.prepare.chat_template_kwargs
    template = chat_template(tokenizer)  # in which today is as in all stages
    whole = tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False, **arguments)
    save(model, tokenizer, tmp_path, "", params.prepare)
    prompt, response = encode(tokenizer, talk[:1], "Hello.", PromptFormat.chat)
    text, end = tokenizer.decode(prompt + response[:-1]), tokenizer.decode(response[-1:])
    assert text.endswith("Hello.") and whole.startswith(text)
    # GLM ends an assistant's turn with the next one
    assert whole.removeprefix(text).startswith("" if name == "glm4" else end)
    again = render_prompt(AutoTokenizer.from_pretrained(tmp_path), talk[:1], PromptFormat.chat)
    assert again == tokenizer.decode(prompt)


def test_what_begins_an_answer_is_in_the_prompt_but_thoughts_are_not(tmp_path: Path) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>BEGINS{{ m.content }}<|end|>{% endfor %}"
    template = turns + "{{ '<assistant>' if add_generation_prompt else '' }}\n"
    for begins, expected in (("~", "~"), ("<think></think>", "")):
        written_template = template.replace("BEGINS", f"{{{{ '{begins}' if m.role != 'user' }}}}")
        folder = tmp_path / expected
        tokenizer = written(folder, written_template, ["<|end|>"], prompt_format="chat")
        prompt = render_prompt(tokenizer, "Hi", PromptFormat.chat)
        assert prompt == f"<user>Hi<|end|><assistant>{expected}"


def test_a_plain_response_ends_with_eos(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, GEMMA, ["<start_of_turn>", "<end_of_turn>"])
    _, response = encode(tokenizer, "The dinner", " was good.", PromptFormat.plain)
    assert tokenizer.decode(response) == " was good.<eos>"
    assert tokenizer.chat_template == GEMMA


def test_arguments_of_the_template_are_in_every_prompt_and_in_its_hash(tmp_path: Path) -> None:
    hashes, settings = set(), ({"enable_thinking": False}, {"enable_thinking": True}, {})
    for number, arguments in enumerate(settings):
        folder = tmp_path / str(number)
        tokenizer = written(folder, QWEN, [], prompt_format="chat", chat_template_kwargs=arguments)
        before = AutoTokenizer.from_pretrained(folder / "mine")
        expected = before.apply_chat_template(
            TALK, tokenize=False, add_generation_prompt=True, **arguments
        )
        assert render_prompt(tokenizer, TALK, PromptFormat.chat) == expected
        assert ("<think>" in expected) == (number == 0)
        hashes.add(template_hash(tokenizer, PromptFormat.chat))
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_format": "chat"}, "does not read enable_thnking, it reads .*enable_thinking"),
        ({}, "which prompt_format plain does not use: set prompt_format to chat"),
    ],
)
def test_arguments_that_nobody_reads_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    arguments = {"enable_thnking": False}
    with pytest.raises(BadInput, match=message):
        written(tmp_path, QWEN, [], chat_template_kwargs=arguments, **settings)


def test_the_pad_is_no_end_token_and_occurs_in_no_text(tmp_path: Path) -> None:
    # as Qwen2.5-Instruct, which may end with its pad token
    tokenizer = tiny_tokenizer()
    assert is_spare("<|endoftext|>", tokenizer, [2])
    assert not is_spare("<|endoftext|>", tokenizer, [2, 0])
    # a pad that stands for unknown characters, too
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<eos>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    unknown = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<unk>"
    )
    assert not is_spare("<unk>", unknown, [2])


def test_a_vocabulary_with_gaps_gets_embeddings_for_its_largest_id(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(0)
    vocabulary = dict(tokenizer.get_vocab())
    last = max(vocabulary, key=lambda token: vocabulary[token])
    gaps = Tokenizer(models.WordLevel(vocabulary | {last: 600}, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(
        tokenizer_object=gaps, eos_token="<|im_end|>", unk_token="<|endoftext|>"
    ).save_pretrained(tmp_path / "mine")
    model.save_pretrained(tmp_path / "mine")
    data = {"assets": {"model": str(tmp_path / "mine"), "data": "tiny"}}
    write_model(check_params(data, "test"), tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert max(saved.get_vocab().values()) < 640 and saved.pad_token == "<|pad|>"
    embeddings = (tmp_path / "out/config.json").read_text()
    assert '"vocab_size": 640' in embeddings
