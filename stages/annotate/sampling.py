"""Responses of the SFT model to training prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt
from stages.lib.data.prompts import check_template, decode, encode, template_hash
from stages.lib.lm import generation
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.vllm_engine import sampling_engine


@dataclass(frozen=True)
class SampledResponses:
    """responses: texts per prompt. template_hash: how the prompts were rendered, for manifests."""

    responses: list[list[str]]
    template_hash: str


def sample_responses(
    prompts: Sequence[Prompt], samples: int, params: Params, round_: str
) -> SampledResponses:
    """Sample so many SFT responses per prompt, at annotate.temperature.

    Raises:
        BadInput: the SFT model was trained with another template.
    """
    setup_torch(params)
    sft = stage_dir(round_, "sft")
    tokenizer = load_tokenizer(sft / "model")
    check_template(sft / "manifest.json", tokenizer, params.prepare.prompt_format)
    prompt_ids = [
        encode(tokenizer, prompt, None, params.prepare.prompt_format)[0] for prompt in prompts
    ]
    model = load_causal_lm(sft / "model", params.model)
    response_ids = generation.sample_responses(
        model,
        tokenizer,
        [ids for ids in prompt_ids for _ in range(samples)],
        params.ppo.model_copy(update={"temperature": params.annotate.temperature}),
        torch.Generator().manual_seed(params.seed),
        sampling_engine(params.model),
    )
    texts = decode(tokenizer, response_ids)
    return SampledResponses(
        [texts[start : start + samples] for start in range(0, len(texts), samples)],
        template_hash(tokenizer, params.prepare.prompt_format),
    )
