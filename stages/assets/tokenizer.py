"""What a tokenizer needs to train chat models: turns that begin and end as in its chat template,
the template's arguments, and a pad token that occurs in no text.

All of it is written into the tokenizer of assets/model. So whoever reads that folder renders
prompts and ends responses alike: every stage, vLLM, lm-eval, the engines, a server.
"""

from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _get_template_variables

from stages.lib.core.errors import BadInput

TURN = "A turn of the assistant."  # to find what begins and ends it in a chat template
TALK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": TURN}]
# The first is reserved for this in Llama 3.1 and later
USUAL_PADS = ("<|finetune_right_pad_id|>", "<|endoftext|>", "<|padding|>", "<pad>", "[PAD]")
NEW_PAD = "<|pad|>"
UNKNOWN = "\U0010fffd"  # a character that no vocabulary has


def end_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a response, the tokenizer's EOS first, if it has one.

    Further ones are those of the model's generation_config, and the token that follows an
    assistant's message in the chat template: instruct models may have learnt only the latter.
    """
    configured = generation_config.eos_token_id
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids += [configured] if isinstance(configured, int) else configured or []
    if tokenizer.chat_template:
        ids += turn_end(tokenizer)
    return list(dict.fromkeys(ids))


def turn_end(tokenizer: Any) -> list[int]:
    """The token that follows an assistant's message in the chat template, if it is one that no text
    has: a special token, or one that was added to the vocabulary.
    """
    _, turn, after = rendered(tokenizer, TALK).rpartition(TURN)
    following = tokenizer(after.strip(), add_special_tokens=False).input_ids[:1] if turn else []
    added = [id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()]
    return [token for token in following if token in [*tokenizer.all_special_ids, *added]]


def end_turns_as_the_template(tokenizer: Any) -> None:
    """Make the token with which the chat template ends a turn the tokenizer's EOS, which SFT
    teaches and at which reward models are read: `<end_of_turn>` of Gemma 3, `<|end|>` of Phi-3.

    A template that writes `eos_token` keeps the token that it was written for.
    """
    old, end = tokenizer.eos_token, turn_end(tokenizer)
    if not end or end == [tokenizer.eos_token_id]:
        return
    if old is not None:
        set_variables(tokenizer, {"eos_token": old})
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end[0])


def begin_turns_as_the_template(tokenizer: Any) -> None:
    """Let the generation prompt end where the chat template begins the assistant's text: gpt-oss
    writes `<|channel|>final<|message|>` in between. Thoughts are the user's to set, by arguments.
    """
    prompt = rendered(tokenizer, TALK[:1], add_generation_prompt=True)
    before, _, _ = rendered(tokenizer, TALK).rpartition(TURN)
    between = before.removeprefix(prompt)
    if prompt and between != before and between and "think" not in between:
        surround(
            tokenizer, after=f"{{% if add_generation_prompt %}}{{{{ {between!r} }}}}{{% endif %}}"
        )


def rendered(tokenizer: Any, talk: list[dict[str, str]], **options: bool) -> str:
    """A conversation as the chat template writes it; empty if it cannot, which prepare reports if
    the template is used.
    """
    try:
        text: str = tokenizer.apply_chat_template(talk, tokenize=False, **options)
    except (TemplateError, TypeError, ValueError):
        return ""
    return text


def set_template_arguments(tokenizer: Any, arguments: dict[str, Any]) -> None:
    """Set arguments of the chat template, e.g. `enable_thinking`, in the template itself.

    Raises:
        BadInput: the template does not read one of them.
    """
    if not arguments:
        return
    known = variables(tokenizer)
    if unread := sorted(arguments.keys() - known):
        raise BadInput(
            f"prepare.chat_template_kwargs: the chat template of {tokenizer.name_or_path} does not "
            f"read {unread[0]}, it reads {', '.join(sorted(known))}; correct the name or remove it"
        )
    set_variables(tokenizer, arguments)


def variables(tokenizer: Any) -> set[str]:
    """The names that the chat template reads and that it may not define itself.

    Raises:
        BadInput: the template has no right syntax.
    """
    try:
        return set(_get_template_variables(tokenizer.get_chat_template()))
    except (TemplateError, ValueError) as error:
        raise BadInput(
            f"the chat template of {tokenizer.name_or_path} cannot be read: {error}; correct it"
        ) from error


def set_variables(tokenizer: Any, values: dict[str, Any]) -> None:
    """Put values of variables before the chat template, if it reads them."""
    read = variables(tokenizer)
    # +%}: a line break that follows stays
    before = "".join(
        f"{{% set {name} = {value!r} +%}}" for name, value in values.items() if name in read
    )
    surround(tokenizer, before=before)


def surround(tokenizer: Any, before: str = "", after: str = "") -> None:
    """Put text before and after the chat template."""

    def whole(template: str) -> str:
        # jinja drops the last line break
        return before + (template.removesuffix("\n") + after if after else template)

    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # one by default, others e.g. for tools
        tokenizer.chat_template = {name: whole(text) for name, text in templates.items()}
    else:
        tokenizer.chat_template = whole(templates)


def set_pad(tokenizer: Any, ends: list[int]) -> None:
    """Set a pad token that occurs in no text and ends none, and pad on the left.

    A trainer masks padding, so with an end token as pad the policy would never learn to stop.
    """
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    if not is_spare(tokenizer.pad_token, tokenizer, ends):
        tokenizer.add_special_tokens({"pad_token": spare_token(tokenizer, ends)})


def spare_token(tokenizer: Any, ends: list[int]) -> str:
    """A pad token that occurs in no text: a usual one of the vocabulary, else a new one."""
    vocabulary = tokenizer.get_vocab()
    usual = (pad for pad in USUAL_PADS if pad in vocabulary and is_spare(pad, tokenizer, ends))
    return next(usual, NEW_PAD)


def is_spare(token: str | None, tokenizer: Any, ends: list[int]) -> bool:
    """Whether a token may be the pad: it ends and begins no text, is no part of the chat template,
    and does not stand for unknown characters.
    """
    used = {*tokenizer.convert_ids_to_tokens(ends), tokenizer.bos_token, None}
    unknown = tokenizer(UNKNOWN, add_special_tokens=False).input_ids
    return (
        token not in used
        and str(token) not in str(tokenizer.chat_template)
        and tokenizer.convert_tokens_to_ids(token) not in unknown
    )
