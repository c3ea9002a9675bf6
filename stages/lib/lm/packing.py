"""Prompts with their responses through a model, without computing a pad token.

Dimensions: B rows of at most L tokens, M tokens in all, N of them of responses, T in the longest
response, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from stages.lib.core.types import TokenIds


@dataclass(frozen=True)
class Packed:
    """Rows, one after the other.

    input_ids, position_ids: (M,). lengths: tokens of each row. place: (M,) each token's index in
    (B, L) rows padded on the right, laid end to end. predicts: (N,) indices into M of what predicts
    a response token, i.e. of the one before it. response_mask: (B, T) bool. last: (B,) indices into
    M of the rows' last tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: list[int]
    place: Tensor
    predicts: Tensor
    response_mask: Tensor
    last: Tensor

    @property
    def targets(self) -> Tensor:
        """(N,) the response tokens of all rows."""
        return self.input_ids[self.predicts + 1]

    def to_rows(self, flat: Tensor) -> Tensor:
        """Lay (N,) values of response tokens out as (B, T), zero behind each row's end."""
        return flat.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask, flat)

    def pad(self, flat: Tensor) -> Tensor:
        """(M, ...) to (B, L, ...), zero behind each row's end."""
        rows, width, rest = len(self.lengths), max(self.lengths), flat.shape[1:]
        return (
            flat.new_zeros(rows * width, *rest)
            .index_copy(0, self.place, flat)
            .view(rows, width, *rest)
        )

    def unpad(self, padded: Tensor) -> Tensor:
        """(B, L, ...) to (M, ...)."""
        return padded.flatten(0, 1).index_select(0, self.place)


def pack(
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    device: torch.device,
    eos_token_id: int | None = None,
) -> Packed:
    """`eos_token_id` closes responses without it: it is read there (a reward model wants it), but
    no token of the response.
    """
    ends_in = response_ids if eos_token_id is None else append_eos(response_ids, eos_token_id)
    rows = [prompt + response for prompt, response in zip(prompt_ids, ends_in, strict=True)]
    lengths, sizes = (
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(response) for response in response_ids]),
    )
    added = torch.tensor([len(response) for response in ends_in]) - sizes
    ends, row = lengths.cumsum(0), torch.arange(len(rows)).repeat_interleave(lengths)
    index = torch.arange(int(ends[-1]))
    positions = index - (ends - lengths)[row]
    ahead = (ends - added)[row] - index  # tokens to the response's end, this one included
    return Packed(
        input_ids=torch.tensor([token for tokens in rows for token in tokens], device=device),
        position_ids=positions.to(device),
        lengths=lengths.tolist(),
        place=(row * int(lengths.max()) + positions).to(device),
        predicts=index[(ahead > 1) & (ahead <= sizes[row] + 1)].to(device),
        response_mask=(torch.arange(int(sizes.max())) < sizes[:, None]).to(device),
        last=(ends - 1).to(device),
    )


def append_eos(response_ids: Sequence[TokenIds], eos_token_id: int) -> list[TokenIds]:
    """Each response with EOS at its end, whether or not it was sampled: reward models are trained
    on EOS, and read there.
    """
    return [ids if ids[-1] == eos_token_id else [*ids, eos_token_id] for ids in response_ids]


def unwrap_peft(model: Any) -> Any:
    """The transformers model inside a PeftModel (its adapter layers stay in place)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_autocast(model: Any) -> torch.autocast:
    """Float32 adapters on a bfloat16 model are multiplied in bfloat16."""
    inner = unwrap_peft(model)
    return torch.autocast(inner.device.type, torch.bfloat16, enabled=inner.dtype is torch.bfloat16)


def hidden_states(
    model: Any, packed: Packed, entering: Tensor | None = None, cache: DynamicCache | None = None
) -> Tensor:
    """(M, H) last hidden states, without the vocabulary's or the score's head; of tokens, or of (M,
    H) states that enter the layers.

    Stages.attention's `grouped` takes the rows apart where they meet, in attention; for other
    implementations they are padded. `cache`: is given the keys and values, laid out as the model
    ran.
    """
    trunk = unwrap_peft(model).base_model
    name, tokens = (
        ("input_ids", packed.input_ids) if entering is None else ("inputs_embeds", entering)
    )
    caching = {"past_key_values": cache, "use_cache": cache is not None}
    with model_autocast(model):
        if supports_packing(trunk):
            return trunk(
                **packed_inputs(packed, trunk.dtype, name, tokens) | caching
            ).last_hidden_state[0]
        mask = packed.pad(torch.ones_like(packed.input_ids))
        return packed.unpad(
            trunk(**{name: packed.pad(tokens)}, attention_mask=mask, **caching).last_hidden_state
        )


def prefill(model: Any, packed: Packed) -> tuple[Tensor, DynamicCache]:
    """(B, H) hidden states of the rows' last tokens, and the cache to go on from, where rows are
    padded on the right.
    """
    cache = DynamicCache()
    states = hidden_states(model, packed, cache=cache)[packed.last]
    if supports_packing(unwrap_peft(model).base_model):
        pairs = ((layer.keys, layer.values) for layer in cache.layers)
        cache = DynamicCache(
            [
                tuple(packed.pad(each[0].transpose(0, 1)).transpose(1, 2) for each in pair)
                for pair in pairs
            ]
        )
    return states, cache


@contextmanager
def padding_free(model: Any) -> Iterator[None]:
    """Batches that a trainer has padded go through the layers as rows end to end, and come back
    padded with zeros.

    What is packed already, or goes on from a cache, as the sampling and scoring of this project
    does, stays as it is.
    """
    trunk = unwrap_peft(model).base_model
    places: list[Tensor | None] = []

    def before(
        _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "packed" in kwargs or kwargs.get("past_key_values") is not None:
            places.append(None)
            return None
        ids, mask = args[0] if args else kwargs["input_ids"], kwargs["attention_mask"].bool()
        packed = pack(
            [row[real].tolist() for row, real in zip(ids, mask, strict=True)],
            [[]] * len(ids),
            ids.device,
        )
        places.append(mask)
        return (), packed_inputs(packed, trunk.dtype, "input_ids", packed.input_ids)

    def after(_: Any, args: Any, output: Any) -> Any:
        if (mask := places.pop()) is None:
            return output
        [states] = output.last_hidden_state
        output.last_hidden_state = states.new_zeros(*mask.shape, states.shape[1]).masked_scatter(
            mask[..., None], states
        )
        return output

    if not supports_packing(trunk):
        yield
        return
    hooks = [
        trunk.register_forward_pre_hook(before, with_kwargs=True),
        trunk.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def supports_packing(trunk: Any) -> bool:
    return trunk.config._attn_implementation == "grouped"


def packed_inputs(packed: Packed, dtype: torch.dtype, name: str, tokens: Tensor) -> dict[str, Any]:
    """Arguments of a trunk that `supports_packing`. Attention pads on the right, where no token sees a
    pad: the mask is causal alone.
    """
    width = max(packed.lengths)
    causal = torch.full(
        (1, 1, width, width), torch.finfo(dtype).min, dtype=dtype, device=tokens.device
    ).triu(1)
    return {
        name: tokens[None],
        "position_ids": packed.position_ids[None],
        "attention_mask": causal,
        "packed": packed,
        "use_cache": False,
    }


def flatten_states(packed: Packed, states: Tensor) -> Tensor:
    """(M, H) of the states between two layers, as `hidden_states` runs them: (1, M, H) or (B, L,
    H).
    """
    return states[0] if states.shape[1] == len(packed.input_ids) else packed.unpad(states)


def _by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Row numbers in batches of like length, so that little padding is computed."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return (order[i : i + batch_size] for i in range(0, len(order), batch_size))
