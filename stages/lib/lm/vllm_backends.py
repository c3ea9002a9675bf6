"""vLLM in this process, and a vLLM server: two backends of stages/lib/lm/vllm_engine.py.

Only this file calls vLLM's and TRL's classes. Written against vLLM 0.32.0 and TRL 1.16.0.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stages.lib.core.params.shared import ModelParams
from stages.lib.core.types import TokenIds

# vLLM's possible values of max_lora_rank, from its default on
LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
# vLLM reserves memory for one text of this length at least
MAX_TEXT_TOKENS = 8192

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class Adapter(NamedTuple):
    """A peft adapter in a folder; each version of an adapter has its own number, from 1."""

    number: int
    folder: Path


class Request(NamedTuple):
    """What is sampled: one response per prompt.

    seeds: one per prompt. end_ids: tokens that end a response. adapter: None: the
    weights as they were loaded.
    """

    prompt_ids: list[TokenIds]
    seeds: list[int]
    response_length: int
    temperature: float
    end_ids: list[int]
    adapter: Adapter | None


class Sampled(NamedTuple):
    """Per prompt: the response's tokens, and their log-probabilities in nats."""

    responses: list[TokenIds]
    logprobs: list[list[float]]


class Backend(Protocol):
    """max_lora_rank: highest rank of an adapter that is handed over; 0: none is.
    why_merged: the reason if it is 0.
    """

    max_lora_rank: int
    why_merged: str

    def load_weights(self, weights: NamedWeights) -> None:
        """Replace the weights by these, under transformers' names."""
        ...

    def sample(self, request: Request) -> Sampled: ...


class LocalVllm:
    """vLLM in this process, on the same GPU. Each prompt has its own seed."""

    def __init__(self, model: Any, rank: int, params: ModelParams) -> None:
        """
        Args:
            model: the transformers model; its folder has config.json.
            rank: of the model's adapter; 0: none.
            params: section `model` of params.yaml.
        """
        # in this process: the weights of another process could only be replaced through files
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        folder = model.name_or_path
        self.max_lora_rank = self._max_lora_rank(folder, rank)
        name = type(model).__name__
        self.why_merged = "" if self.max_lora_rank else f"vLLM has no LoRA for {name}"
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        lora = {"max_lora_rank": self.max_lora_rank, "max_loras": 1} if self.max_lora_rank else {}
        with same_random_state():
            self.llm = LLM(
                model=folder,
                # prompts and responses are tokens
                skip_tokenizer_init=True,
                dtype=str(model.dtype).removeprefix("torch."),
                max_model_len=min(positions or MAX_TEXT_TOKENS, MAX_TEXT_TOKENS),
                gpu_memory_utilization=params.vllm_gpu_memory_utilization,
                # of the distribution that is sampled: at the temperature
                logprobs_mode="processed_logprobs",
                # no defaults of generation_config.json, such as top_p
                generation_config="vllm",
                enable_lora=bool(lora),
                **lora,
            )

    @staticmethod
    def _max_lora_rank(folder: str, rank: int) -> int:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.models import ModelRegistry, supports_lora

        config = EngineArgs(model=folder, skip_tokenizer_init=True).create_model_config()
        model_class, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
        fitting = [allowed for allowed in LORA_RANKS if rank <= allowed]
        return fitting[0] if supports_lora(model_class) and fitting else 0

    def load_weights(self, weights: NamedWeights) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        # keys and values of the old weights
        self.llm.reset_prefix_cache()

    def sample(self, request: Request) -> Sampled:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None
        if request.adapter:
            # by number and name vLLM keeps adapters, and keys and values that they made
            number, folder = request.adapter
            lora = LoRARequest(str(number), number, str(folder))
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in request.prompt_ids],
            [
                SamplingParams(
                    seed=seed,
                    temperature=request.temperature,
                    max_tokens=request.response_length,
                    stop_token_ids=request.end_ids,
                    ignore_eos=True,  # end_ids has it
                    detokenize=False,
                    logprobs=0,  # of the sampled token alone
                )
                for seed in request.seeds
            ],
            use_tqdm=False,
            lora_request=lora,
        )
        completions = [output.outputs[0] for output in outputs]
        return Sampled(
            [list(completion.token_ids) for completion in completions],
            [
                [
                    at_token[token].logprob
                    for token, at_token in zip(
                        completion.token_ids, completion.logprobs, strict=True
                    )
                ]
                for completion in completions
            ],
        )


class VllmServer:
    """A server started with `vllm serve`, through TRL's client: adapters are merged, and without
    seeds, since the server would give all prompts the same one.
    """

    max_lora_rank, why_merged = 0, "a server gets whole weights"

    def __init__(self, model: Any, params: ModelParams) -> None:
        # imported here: TRL takes seconds to import
        from trl.generation.vllm_client import VLLMClient

        self.client = VLLMClient(base_url=params.vllm_server_base_url)
        self.client.init_communicator(device=model.device)

    def load_weights(self, weights: NamedWeights) -> None:
        metadata = [
            (name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
            for name, weight in weights()
        ]
        self.client.update_named_params(metadata, weights())
        self.client.reset_prefix_cache()

    def sample(self, request: Request) -> Sampled:
        output = self.client.generate(
            request.prompt_ids,
            temperature=request.temperature,
            max_tokens=request.response_length,
            logprobs=0,
            generation_kwargs={"ignore_eos": True, "stop_token_ids": request.end_ids},
        )
        # TRL gives a list per token, with None for NaN
        return Sampled(
            output["completion_ids"],
            [
                [float("nan") if logprob is None else logprob for [logprob] in row]
                for row in output["logprobs"]
            ],
        )


@contextmanager
def same_random_state() -> Iterator[None]:
    """Within this context, vLLM may seed torch's generators."""
    with torch.random.fork_rng():
        yield
