"""Responses of the SFT model to training prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.responses import responder


@dataclass(frozen=True)
class SftTexts:
    """Texts of the SFT model."""

    by_prompt: list[list[str]]
    template_hash: str  # how the prompts were rendered, for manifests


def sample_sft(prompts: Sequence[Prompt], samples: int, params: Params, round_: str) -> SftTexts:
    """Sample so many SFT responses per prompt, at annotate.temperature.

    Raises:
        BadInput: the SFT model was trained with another template.
    """
    setup_torch(params)
    sft = stage_dir(round_, "sft")
    tokenizer = load_tokenizer(sft / "model")
    check_template(sft / "manifest.json", tokenizer, params.prepare.prompt_format)
    respond = responder(params, tokenizer, temperature=params.annotate.temperature)
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    responses = respond(load_causal_lm(sft / "model", params.model), repeated, params.seed)
    texts = [response.text for response in responses]
    return SftTexts(
        [texts[start : start + samples] for start in range(0, len(texts), samples)],
        template_hash(tokenizer, params.prepare.prompt_format),
    )
