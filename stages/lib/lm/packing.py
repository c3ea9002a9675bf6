"""Forward passes of prompts with responses that compute no pad token: rows are laid end to end; and
lower layers that several models share run once for all of them.

Models from the same base that were trained on their upper layers only have equal lower layers.
Shapes: B rows of at most L tokens, M tokens of all rows, N response tokens of all rows, T tokens of
the longest response, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from stages.lib.core.types import TokenIds
from stages.lib.lm.end_tokens import EndTokens

# Layers by transformers' names that attend to tokens. All others pass a state from token to token.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class Packed:
    """Rows of tokens, one after the other.

    input_ids: (M,) tokens.
    position_ids: (M,) position of each token in its row.
    lengths: tokens per row.
    padded_index: (M,) index of each token in (B, L) rows padded on the right, flattened.
    predicts: (N,) index of the token before each response token, whose logits predict it.
    targets: (N,) response tokens of all rows, as they were sampled.
    response_mask: (B, T) bool, true for tokens of a response.
    last: (B,) index of each row's last token.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    padded_index: Tensor
    predicts: Tensor
    targets: Tensor
    response_mask: Tensor
    last: Tensor

    def to_rows(self, flat: Tensor) -> Tensor:
        """Arrange (N,) values of response tokens as (B, T), with zeros after a response's end."""
        return flat.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask, flat)

    def pad(self, flat: Tensor) -> Tensor:
        """Arrange (M, ...) values as (B, L, ...), with zeros after the end of a row."""
        rows, width, rest = len(self.lengths), max(self.lengths), flat.shape[1:]
        return (
            flat.new_zeros(rows * width, *rest)
            .index_copy(0, self.padded_index, flat)
            .view(rows, width, *rest)
        )

    def unpad(self, padded: Tensor) -> Tensor:
        """Arrange (B, L, ...) values as (M, ...), without the padding."""
        return padded.flatten(0, 1).index_select(0, self.padded_index)


def pack(
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    device: torch.device,
    ends: EndTokens | None = None,
) -> Packed:
    """Lay prompts with their responses end to end.

    Args:
        prompt_ids: tokens of each prompt, at least one.
        response_ids: tokens of each response; [] for none.
        device: device of the tensors.
        ends: if given, every row ends with the canonical end token, because a reward model is read
            there. Appended to a response that was cut off, it is not a response token: no
            log-probability. In place of another end token that was sampled, it changes no
            log-probability, since no other token follows.

    Returns:
        The rows, in order.

    Raises:
        ValueError: the numbers of prompts and responses differ.
        IndexError: there are no rows, or a response is empty and `ends` is given.

    Example:
        >>> packed = pack([[5, 6], [7]], [[8], [9, 2]], torch.device("cpu"))
        >>> packed.input_ids.tolist(), packed.lengths, packed.targets.tolist()
        ([5, 6, 8, 7, 9, 2], [3, 3], [8, 9, 2])
        >>> packed.predicts.tolist(), packed.last.tolist()
        ([1, 3, 4], [2, 5])
    """
    closed = response_ids if ends is None else [ends.close(ids) for ids in response_ids]
    rows = [prompt + response for prompt, response in zip(prompt_ids, closed, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    response_lengths = torch.tensor([len(response) for response in response_ids])
    appended = torch.tensor([len(response) for response in closed]) - response_lengths
    row_ends, row = lengths.cumsum(0), torch.arange(len(rows)).repeat_interleave(lengths)
    index = torch.arange(int(row_ends[-1]))
    positions = index - (row_ends - lengths)[row]
    # Tokens to the end of the response, this one included: a token before a response token has at
    # least 2 of them, and at most one more than the response is long.
    remaining = (row_ends - appended)[row] - index
    predicts = (remaining > 1) & (remaining <= response_lengths[row] + 1)
    longest = torch.arange(int(response_lengths.max()))
    return Packed(
        input_ids=torch.tensor([token for tokens in rows for token in tokens], device=device),
        position_ids=positions.to(device),
        lengths=lengths.tolist(),
        padded_index=(row * int(lengths.max()) + positions).to(device),
        predicts=index[predicts].to(device),
        targets=torch.tensor(
            [token for response in response_ids for token in response],
            dtype=torch.long,
            device=device,
        ),
        response_mask=(longest < response_lengths[:, None]).to(device),
        last=(row_ends - 1).to(device),
    )


def unwrap_peft(model: Any) -> Any:
    """The transformers model inside a PeftModel (its adapter layers stay in place)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_autocast(model: Any) -> torch.autocast:
    """Autocast to bfloat16 for a bfloat16 model, whose adapters are float32."""
    inner = unwrap_peft(model)
    return torch.autocast(inner.device.type, torch.bfloat16, enabled=inner.dtype is torch.bfloat16)


def hidden_states(
    model: Any, packed: Packed, entering: Tensor | None = None, cache: DynamicCache | None = None
) -> Tensor:
    """Run the layers of a model, without the head (vocabulary or score).

    With `grouped` attention and FlashAttention-2 the rows run end to end if attention alone
    separates them (`supports_packing`). Else they are padded on the right, which no token before
    the pads can see.

    Args:
        model: a transformers model or a PeftModel.
        packed: the rows.
        entering: (M, H) states to start from instead of the tokens' embeddings.
        cache: receives the keys and values, in the layout in which the rows ran.

    Returns:
        (M, H) last hidden states.
    """
    trunk = unwrap_peft(model).base_model
    name, tokens = (
        ("input_ids", packed.input_ids) if entering is None else ("inputs_embeds", entering)
    )
    caching = {"past_key_values": cache, "use_cache": cache is not None}
    with model_autocast(model):
        if supports_packing(trunk, max(packed.lengths)):
            return trunk(**packed_inputs(trunk, packed, name, tokens) | caching).last_hidden_state[
                0
            ]
        mask = packed.pad(torch.ones_like(packed.input_ids))
        return packed.unpad(
            trunk(**{name: packed.pad(tokens)}, attention_mask=mask, **caching).last_hidden_state
        )


def prefill(model: Any, packed: Packed, tokens: int) -> tuple[Tensor, DynamicCache, Tensor]:
    """Run prompts and keep the cache, to sample responses from.

    Args:
        model: a causal language model or a PeftModel.
        packed: the prompts.
        tokens: of the longest row at the end of sampling.

    Returns:
        (B, H) hidden states of the rows' last tokens, the cache, and the (B, L) mask of the tokens
        in it, which are no pads.
    """
    trunk = unwrap_peft(model).base_model
    if not supports_packing(trunk, tokens) or is_beyond_window(trunk, tokens):
        return _prefill_after_pads(model, packed)
    cache = DynamicCache()
    states = hidden_states(model, packed, cache=cache)[packed.last]
    pairs = ((layer.keys, layer.values) for layer in cache.layers)
    padded = DynamicCache(
        [
            tuple(packed.pad(values[0].transpose(0, 1)).transpose(1, 2) for values in pair)
            for pair in pairs
        ]
    )
    return states, padded, packed.pad(torch.ones_like(packed.input_ids))


def _prefill_after_pads(model: Any, packed: Packed) -> tuple[Tensor, DynamicCache, Tensor]:
    """`prefill` with pads before the prompts and transformers' own cache. So no pad is between a
    prompt and its response, where a state would pass it, and a window or a distance count it.
    """
    trunk = unwrap_peft(model).base_model
    ids, mask = (
        pad_sequence(values.split(packed.lengths), batch_first=True, padding_side="left")
        for values in (packed.input_ids, torch.ones_like(packed.input_ids))
    )
    cache = DynamicCache(config=trunk.config)
    with model_autocast(model):
        states = trunk(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
    return states, cache, mask


@contextmanager
def padding_free(model: Any) -> Iterator[None]:
    """Within this context, padded batches of a trainer run through the layers without padding.

    The rows are laid end to end; the hidden states come back padded with zeros. Calls that are
    packed already or continue from a cache, as in this project's sampling and scoring, are not
    changed. Does nothing if the model's attention cannot run rows end to end.
    """
    trunk = unwrap_peft(model).base_model
    masks: list[Tensor | None] = []  # of the calls in progress; None for a call left unchanged

    def before(
        _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "packed" in kwargs or kwargs.get("past_key_values") is not None:
            masks.append(None)
            return None
        ids, mask = args[0] if args else kwargs["input_ids"], kwargs["attention_mask"].bool()
        if not supports_packing(trunk, int(mask.sum(1).max())):
            masks.append(None)
            return None
        packed = pack(
            [row[real].tolist() for row, real in zip(ids, mask, strict=True)],
            [[]] * len(ids),
            ids.device,
        )
        masks.append(mask)
        return (), packed_inputs(trunk, packed, "input_ids", packed.input_ids)

    def after(_: Any, args: Any, output: Any) -> Any:
        if (mask := masks.pop()) is None:
            return output
        [states] = output.last_hidden_state
        output.last_hidden_state = states.new_zeros(*mask.shape, states.shape[1]).masked_scatter(
            mask[..., None], states
        )
        return output

    hooks = [
        trunk.register_forward_pre_hook(before, with_kwargs=True),
        trunk.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def supports_packing(trunk: Any, longest: int) -> bool:
    """Whether these layers can run rows of up to `longest` tokens end to end."""
    attention = trunk.config._attn_implementation
    return not carries_state(trunk) and (
        attention == "flash_attention_2"
        or (attention == "grouped" and not is_beyond_window(trunk, longest))
    )


def carries_state(trunk: Any) -> bool:
    """Whether layers pass a state from token to token: it leaks from one row into the next."""
    layers = set(getattr(trunk.config.get_text_config(), "layer_types", None) or [])
    return bool(trunk._is_stateful) or not layers <= ATTENTION_LAYERS


def is_beyond_window(trunk: Any, tokens: int) -> bool:
    """Whether a layer's attention reaches back less than `tokens` tokens."""
    config = trunk.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["sliding_attention", "chunked_attention"]
    kinds = (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size"))
    windows = (getattr(config, key, None) for layer, key in kinds if layer in layers)
    return any(window and tokens > window for window in windows)


def packed_inputs(trunk: Any, packed: Packed, name: str, tokens: Tensor) -> dict[str, Any]:
    """Arguments for layers that support packing.

    Args:
        trunk: the layers.
        packed: the rows.
        name: argument name of `tokens`, `input_ids` or `inputs_embeds`.
        tokens: (M,) tokens, or (M, H) states.
    """
    inputs = {
        name: tokens[None],
        "position_ids": packed.position_ids[None],
        "attention_mask": None,
        "packed": packed,
        "use_cache": False,
    }
    if trunk.config._attn_implementation == "flash_attention_2":
        return inputs  # without a mask it finds the rows by their positions
    width, dtype = max(packed.lengths), trunk.dtype
    # Attention pads rows on the right, where a causal mask hides the pads: no padding mask needed.
    causal = torch.full(
        (1, 1, width, width), torch.finfo(dtype).min, dtype=dtype, device=tokens.device
    ).triu(1)
    return inputs | {"attention_mask": causal}


def flatten_states(packed: Packed, states: Tensor) -> Tensor:
    """Arrange states between two layers of `hidden_states` as (M, H).

    They are (1, M, H) if the rows ran end to end, else (B, L, H). Several states per token (Gemma
    3n) are returned as they are: no layer can start from them (`can_start_from_states`).
    """
    if states.dim() > 3:
        return states
    return states[0] if states.shape[1] == len(packed.input_ids) else packed.unpad(states)


class IdentityLayer(torch.nn.Module):
    """Stands in for a layer that has run already.

    The other layers must keep their numbers, because some models choose the kind of attention by
    the number of the layer.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class CheckpointedLayer(torch.nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # the layers have no dropout
        return checkpoint(
            self.layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def find_layers(model: Any) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """Find the decoder layers of a model.

    Returns:
        The module that contains the list of layers, the list's attribute name, and the list.
    """
    trunk, count = (
        unwrap_peft(model).base_model,
        unwrap_peft(model).config.get_text_config().num_hidden_layers,
    )
    path, layers = next(
        (p, m)
        for p, m in trunk.named_modules()
        if isinstance(m, torch.nn.ModuleList) and len(m) == count
    )
    above, _, name = path.rpartition(".")
    return trunk.get_submodule(above), name, layers


def num_layers_below_adapters(model: Any) -> int:
    """Number of layers below the lowest one with an adapter."""
    *_, layers = find_layers(model)
    adapted = (
        i
        for i, layer in enumerate(layers)
        if any(isinstance(m, BaseTunerLayer) for m in layer.modules())
    )
    return next(adapted, len(layers))


def num_shared_layers(*models: Any) -> int:
    """Number of the lowest layers that are bit-identical in all models, embeddings included.

    0 if a model cannot start from hidden states: some, e.g. GPT-2, add position embeddings before
    the first layer. This is tried on the first model, because all have the same architecture.
    """
    first, *others = models
    # The last layer is never shared, so that each model has at least one of its own.
    same = min(len(find_layers(first)[2]) - 1, *map(num_layers_below_adapters, models))
    for other in others:
        if type(unwrap_peft(first).base_model) is not type(unwrap_peft(other).base_model):
            return 0
        if not _equal(
            unwrap_peft(first).get_input_embeddings(), unwrap_peft(other).get_input_embeddings()
        ):
            return 0
        pairs = zip(find_layers(first)[2][:same], find_layers(other)[2][:same], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if not _equal(a, b)), same)
    return same if same and can_start_from_states(first, same) else 0


def _equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    if a is b:
        return True
    weights_a, weights_b = a.state_dict(), b.state_dict()
    return (
        type(a) is type(b)
        and weights_a.keys() == weights_b.keys()
        and all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    )


@torch.no_grad()
def can_start_from_states(model: Any, first: int) -> bool:
    """Whether the layers from `first` on give the whole model's result, on a probe.

    Not those of GPT-2 and OPT, which add position embeddings to the states that they start from,
    nor of Gemma 3n, which has several states per token, nor those whose embeddings have another
    width than the states (OPT-350m).
    """
    row = pack([[1, 2, 3]], [[]], unwrap_peft(model).device)
    width = unwrap_peft(model).get_input_embeddings().weight.shape[-1]
    with _record_inputs(model, [first]) as inputs:
        whole = hidden_states(model, row)
    if inputs[first].dim() != 3 or inputs[first].shape[-1] != width:
        return False
    entering = flatten_states(row, inputs[first])
    return torch.allclose(
        forward_layers(model, row, entering, first)[0], whole, rtol=1e-2, atol=1e-2
    )


def forward_layers(
    model: Any,
    packed: Packed,
    entering: Tensor | None = None,
    first: int = 0,
    keep: Sequence[int] = (),
    gradient_checkpointing: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Run a model, or its layers from `first` on.

    Args:
        model: a transformers model or a PeftModel.
        packed: the rows.
        entering: (M, H) states that enter layer `first`; None: start from the tokens.
        first: number of the first layer to run, if `entering` is given.
        keep: numbers of layers whose entering states are returned, too.
        gradient_checkpointing: keep only the states between layers for the backward pass.

    Returns:
        (M, H) last hidden states, and the (M, H) states that enter each layer of `keep`.
    """
    skipped = 0 if entering is None else first
    with (
        _with_layers(model, skipped, gradient_checkpointing),
        _record_inputs(model, keep) as inputs,
    ):
        states = hidden_states(model, packed, entering)
        return states, [flatten_states(packed, inputs[number]) for number in keep]


@contextmanager
def _with_layers(model: Any, first: int, gradient_checkpointing: bool) -> Iterator[None]:
    """Within this context, the layers below `first` do nothing, and the others may be
    checkpointed.
    """
    holder, name, layers = find_layers(model)
    upper = map(CheckpointedLayer, layers[first:]) if gradient_checkpointing else layers[first:]
    setattr(holder, name, torch.nn.ModuleList([*(IdentityLayer() for _ in range(first)), *upper]))
    try:
        yield
    finally:
        setattr(holder, name, layers)


@contextmanager
def _record_inputs(model: Any, numbers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Within this context, record the states that enter these layers, by number of the layer."""
    *_, layers = find_layers(model)
    recorded: dict[int, Tensor] = {}

    def record(number: int) -> Any:
        return layers[number].register_forward_pre_hook(
            lambda _, inputs: recorded.update({number: inputs[0]})
        )

    hooks = [record(number) for number in set(numbers)]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
