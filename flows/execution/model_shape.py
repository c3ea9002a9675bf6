"""Sizes of a language model, from its config.json: what memory and disk depend on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json
from stages.lib.core.params.shared import LoraParams

CONFIG = "config.json"
HUB_SECONDS = 5.0  # limit of a request for it
# Model types whose MLP has two matrices; others have three, one of them a gate.
WITHOUT_GATE = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi"}
# Names of the same size in configs of older models
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder: `layers` layers of attention and MLP between embeddings and a vocabulary head.

    hidden: size of a token's state. heads, key_heads: of queries, and of keys and values.
    head_size: of one head. inner: hidden size of the MLP. gated: the MLP has three matrices, not
    two. tied: the vocabulary head is the embeddings.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    inner: int
    vocabulary: int
    gated: bool = True
    tied: bool = True

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear maps of a layer: queries, keys, values, output; MLP."""
        queries, keys = self.heads * self.head_size, self.key_heads * self.head_size
        mlp = [(self.hidden, self.inner)] * (2 if self.gated else 1) + [(self.inner, self.hidden)]
        projections = [queries, keys, keys]
        return [*((self.hidden, size) for size in projections), (queries, self.hidden), *mlp]

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Weights of layers, embeddings and head, without norms and biases (below 0.1%)."""
        return self.layer_weights + self.embedding_weights * (1 if self.tied else 2)

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.matrices)

    def trained_layers(self, lora: LoraParams) -> int:
        """Layers that the backward pass runs through."""
        return min(lora.top_layers or self.layers, self.layers) if lora.r else self.layers

    def adapter_weights(self, lora: LoraParams) -> int:
        """Weights of adapters on all linear maps (Hu et al. 2021): A is (r, inputs), B (outputs,
        r).
        """
        return lora.r * self.trained_layers(lora) * sum(map(sum, self.matrices))


# The models of the package, which have no config.json before the stage `assets` has run
KNOWN = {
    "tiny": ModelShape(64, 2, 4, 2, 16, 128, 435),
    "embedded": ModelShape(576, 30, 9, 3, 64, 1536, 49_152),
}

# Sizes that `rondo plan` knows by name: those of Qwen2.5 and Llama 3, by their config.json
NAMED_SIZES = {
    "0.5b": ModelShape(896, 24, 14, 2, 64, 4864, 151_936),
    "1.5b": ModelShape(1536, 28, 12, 2, 128, 8960, 151_936),
    "3b": ModelShape(2048, 36, 16, 2, 128, 11_008, 151_936),
    "7b": ModelShape(3584, 28, 28, 4, 128, 18_944, 152_064, tied=False),
    "8b": ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256, tied=False),
    "14b": ModelShape(5120, 48, 40, 8, 128, 13_824, 152_064, tied=False),
    "32b": ModelShape(5120, 64, 40, 8, 128, 27_648, 152_064, tied=False),
    "70b": ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256, tied=False),
    "72b": ModelShape(8192, 80, 64, 8, 128, 29_568, 152_064, tied=False),
}


def read_shape(model: str) -> ModelShape | None:
    """The shape of a model by its name in `assets.model`.

    Returns:
        None if it is not known: a model of the hub without a config.json in the cache, while the
        hub cannot be reached.

    Raises:
        BadInput: a local folder's config.json is missing or has no sizes of a decoder.
    """
    name, _, revision = model.partition("@")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return shape_of(read_json(folder / CONFIG, "save_pretrained"), str(folder))
    if name in KNOWN:
        return KNOWN[name]
    config = _hub_config(name, revision)
    return shape_of(config, model) if config else None


def _hub_config(name: str, revision: str) -> Mapping[str, Any] | None:
    """config.json of a model of the hub, from the cache or the hub; None if neither has it.

    One request with a short limit: huggingface_hub's own functions retry for half a minute.
    """
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers, httpx  # type: ignore[attr-defined]

    revision = revision or "main"
    try:
        if isinstance(path := try_to_load_from_cache(name, CONFIG, revision=revision), str):
            return json.loads(Path(path).read_text(encoding="utf-8"))
        if constants.HF_HUB_OFFLINE:
            return None
        response = httpx.get(
            hf_hub_url(name, CONFIG, revision=revision),
            headers=build_hf_headers(),
            follow_redirects=True,
            timeout=HUB_SECONDS,
        )
        return response.raise_for_status().json()
    except (httpx.HTTPError, HFValidationError, OSError, ValueError):
        return None


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of a transformers config.

    Args:
        config: the JSON of config.json; `text_config` in it is the decoder of a model that reads
            images, too.
        source: for the error message.

    Raises:
        BadInput: a size is missing.
    """
    text = {**config, **config.get("text_config", {})}
    sizes: dict[str, Any] = {
        size: next((text[name] for name in names if text.get(name) is not None), None)
        for size, names in NAMES.items()
    }
    if isinstance(sizes["inner"], list):
        sizes["inner"] = max(sizes["inner"])  # Gemma 3n's, per layer
    if sizes["inner"] is None and sizes["hidden"]:
        sizes["inner"] = 4 * sizes["hidden"]  # GPT-2's default
    if missing := [NAMES[size][0] for size, value in sizes.items() if value is None]:
        raise BadInput(
            f"{source}: config.json has no {', '.join(missing)}; expected the config of a causal "
            "language model of transformers"
        )
    heads = sizes["heads"]
    return ModelShape(
        **sizes,
        key_heads=text.get("num_key_value_heads") or heads,
        head_size=text.get("head_dim") or sizes["hidden"] // heads,
        gated=text.get("model_type") not in WITHOUT_GATE,
        # transformers' own default is true
        tied=text.get("tie_word_embeddings", True),
    )
