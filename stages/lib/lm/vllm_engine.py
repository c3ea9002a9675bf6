"""Sampling by vLLM (`model.use_vllm`) in place of `generate`, in every stage that samples.

vLLM gets the weights of the model that is sampled: frozen ones once, the adapter and weights that
may be trained before each call. Adapters that vLLM cannot read are merged in memory, and all
weights are sent. Two backends call vLLM's and TRL's classes: vLLM in this process, and a vLLM
server. Written against vLLM 0.32.0 and TRL 1.16.0.
"""

import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params.shared import ModelParams, VllmMode
from stages.lib.core.progress import progress
from stages.lib.core.types import TokenIds
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.packing import unwrap_peft
from stages.lib.lm.saving import save_adapter

# vLLM's possible values of max_lora_rank, from its default on
LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
# vLLM reserves memory for one text of this length at least
MAX_TEXT_TOKENS = 8192

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class Adapter(NamedTuple):
    """A peft adapter in a folder; each version of an adapter has its own number, from 1."""

    number: int
    folder: Path


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

    def sample(
        self,
        prompt_ids: list[TokenIds],
        seeds: list[int],
        adapter: Adapter | None,
        *,
        response_length: int,
        temperature: float,
        end_ids: list[int],
    ) -> Sampled:
        """One response per prompt, each with its own seed; adapter: None: the weights as they were
        loaded.
        """
        ...


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
        with torch.random.fork_rng():  # vLLM may seed torch's generators
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

    def sample(
        self,
        prompt_ids: list[TokenIds],
        seeds: list[int],
        adapter: Adapter | None,
        *,
        response_length: int,
        temperature: float,
        end_ids: list[int],
    ) -> Sampled:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None
        if adapter:
            # by number and name vLLM keeps adapters, and keys and values that they made
            number, folder = adapter
            lora = LoRARequest(str(number), number, str(folder))
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompt_ids],
            [
                SamplingParams(
                    seed=seed,
                    temperature=temperature,
                    max_tokens=response_length,
                    stop_token_ids=end_ids,
                    ignore_eos=True,  # end_ids has it
                    detokenize=False,
                    logprobs=0,  # of the sampled token alone
                )
                for seed in seeds
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

    def sample(
        self,
        prompt_ids: list[TokenIds],
        seeds: list[int],
        adapter: Adapter | None,
        *,
        response_length: int,
        temperature: float,
        end_ids: list[int],
    ) -> Sampled:
        output = self.client.generate(
            prompt_ids,
            temperature=temperature,
            max_tokens=response_length,
            logprobs=0,
            generation_kwargs={"ignore_eos": True, "stop_token_ids": end_ids},
        )
        # TRL gives a list per token, with None for NaN
        return Sampled(
            output["completion_ids"],
            [
                [float("nan") if logprob is None else logprob for [logprob] in row]
                for row in output["logprobs"]
            ],
        )


# Mean |log-ratio| per token of vLLM and of the model, in nats. Rounding in bfloat16 gives a few
# hundredths, weights of another model more: at most 0.1, and at most three times the first one, by
# the weights that vLLM has loaded itself. (Merged adapters, which are rounded once more, had twice
# as much.) In float32 that one is nearly 0.
MAX_SAMPLER_LOG_RATIO, MAX_RISE, NEGLIGIBLE_LOG_RATIO = 0.1, 3.0, 0.01
# Responses of each call that are compared; PPO compares those of its rollouts all
CHECKED_RESPONSES = 8


class VllmEngine:
    """Samples as `stages.lib.lm.generation.generate` does.

    Attributes:
        logprobs: of the tokens that were sampled last, in nats, response by response.
    """

    def __init__(self, params: ModelParams) -> None:
        """
        Raises:
            BadInput: vLLM is not installed.
        """
        if find_spec("vllm") is None:
            raise BadInput(
                "model.use_vllm: vLLM is not installed; install it on a machine with a GPU "
                "(docs/ppo.md names the versions), or set it to false"
            )
        self.params, self.logprobs = params, list[float]()
        self.backend: Backend | None = None
        self.folder = TemporaryDirectory(prefix="rondo-adapters-")
        self.frozen: weakref.ref[Any] | None = None  # the model whose frozen weights vLLM has
        self.adapter = Adapter(0, Path(self.folder.name) / "0")
        self.reasons = set[str]()  # for merging, which were printed
        self.max_log_ratio, self.loaded_head = MAX_SAMPLER_LOG_RATIO, 0.0

    def sample(
        self,
        model: Any,
        prompt_ids: Sequence[TokenIds],
        *,
        response_length: int,
        temperature: float,
        generator: torch.Generator,
        ends: EndTokens,
    ) -> list[TokenIds]:
        """Sample one response per prompt; arguments and result as in `generate`.

        Each prompt gets a seed of its own from the generator, so two models with the same generator
        state get the same random numbers. The tokens are not those of `generate`.

        Raises:
            BadInput: vLLM would keep an old output layer.
            RondoError: vLLM's log-probabilities are not those of the model.
        """
        if not prompt_ids:
            self.logprobs = []
            return []
        first = self.backend is None
        if self.backend is None:
            self.backend = self.start(model)
            self.loaded_head = sum_of_head(unwrap_peft(model))
        adapter = self.send(self.backend, model)
        seeds = torch.randint(2**31, (len(prompt_ids),), generator=generator).tolist()
        with progress("sampling by vLLM"):
            responses, logprobs = self.backend.sample(
                list(prompt_ids),
                seeds,
                adapter,
                response_length=response_length,
                temperature=temperature,
                end_ids=list(ends.ids),
            )
        self.logprobs = [value for row in logprobs for value in row]
        few = slice(CHECKED_RESPONSES)
        of_model = token_logprobs(model, prompt_ids[few], responses[few], temperature=temperature)
        gap = self.check([value for row in logprobs[few] for value in row], torch.cat(of_model))
        if first:
            limit = max(MAX_RISE * gap, NEGLIGIBLE_LOG_RATIO)
            self.max_log_ratio = min(limit, MAX_SAMPLER_LOG_RATIO)
        return responses

    def check(self, sampled: Sequence[float], logprobs: Tensor) -> float:
        """`check_log_ratio` with the limit of this engine."""
        return check_log_ratio(sampled, logprobs, self.max_log_ratio)

    def start(self, model: Any) -> Backend:
        """The backend; it takes its memory until the process ends."""
        inner = unwrap_peft(model)
        if self.params.vllm_mode is VllmMode.server:
            return VllmServer(inner, self.params)
        return LocalVllm(inner, rank_of(active_adapters(model)), self.params)

    def send(self, backend: Backend, model: Any) -> Adapter | None:
        """Give vLLM the weights of the model; frozen ones once, those that may change each time.

        torch's counters of changes in place would tell which did, but for fused optimizers.

        Returns:
            The adapter to sample with; None: there is none, or it is merged.
        """
        adapters, inner = active_adapters(model), unwrap_peft(model)
        reason = why_merged(backend, adapters) if adapters else ""
        if reason not in self.reasons | {""}:
            print(f"model.use_vllm: adapters are merged, because {reason}", flush=True)
            self.reasons.add(reason)
        merged = adapters if reason else {}
        frozen = not merged and not any(p.requires_grad for _, p in base_parameters(model))
        if not (frozen and self.frozen is not None and self.frozen() is inner):
            check_output_layer(self.params, inner, self.loaded_head)
            backend.load_weights(lambda: named_weights(model, merged))
        self.frozen = weakref.ref(inner) if frozen else None
        if merged or not adapters:
            return None
        number = self.adapter.number + 1
        shutil.rmtree(self.adapter.folder, ignore_errors=True)
        self.adapter = Adapter(number, Path(self.folder.name) / str(number))
        save_adapter(model, self.adapter.folder)
        return self.adapter


@cache
def _engine(*settings: Any) -> VllmEngine:
    return VllmEngine(ModelParams(**dict(settings)))


def sampling_engine(params: ModelParams) -> VllmEngine | None:
    """The engine of this process; None: stages/lib/lm/generation.py samples."""
    if not params.use_vllm:
        return None
    return _engine(*sorted(params.model_dump().items()))


def check_output_layer(params: ModelParams, inner: Any, loaded: float) -> None:
    """Check that vLLM takes all weights that it gets.

    Args:
        params: section `model` of params.yaml.
        inner: the model, without adapters.
        loaded: `sum_of_head` of the model with which vLLM was started.

    Raises:
        BadInput: it would keep its output layer, since it packs it when it starts on a CPU, and
            does not pack it again if it is the embedding matrix.
    """
    tied = inner.config.get_text_config().tie_word_embeddings
    on_cpu = params.vllm_mode is VllmMode.colocate and inner.device.type == "cpu"
    if not (tied and on_cpu):
        return
    if sum_of_head(inner) != loaded:
        raise BadInput(
            "model.use_vllm: on a CPU, vLLM keeps the output layer that it has loaded first if it "
            "is the embedding matrix (tie_word_embeddings in config.json), and this one has "
            "changed in training. Next: set model.use_vllm to false, or sft.lora.r and ppo.lora.r "
            "above 0"
        )


def sum_of_head(inner: Any) -> float:
    """The sum of the weights of a model's output layer: equal layers have equal sums."""
    return float(inner.get_output_embeddings().weight.detach().double().sum())


def check_log_ratio(
    sampled: Sequence[float], logprobs: Tensor, limit: float = MAX_SAMPLER_LOG_RATIO
) -> float:
    """Mean |log p_vllm - log p| of sampled tokens, in nats.

    Args:
        sampled: N log-probabilities by vLLM.
        logprobs: (N,) by the model.
        limit: in nats.

    Raises:
        RondoError: it is above the limit, or not a number.
    """
    gap = float((torch.tensor(sampled, device=logprobs.device) - logprobs).abs().mean())
    if not gap <= limit:
        raise RondoError(
            f"model.use_vllm: log-probabilities of vLLM and of the model differ by {gap:.3g} nats "
            f"per token (at most {limit:.3g}), so the responses are not of this "
            "model. Next: check that vLLM received all weights (its log) and runs with "
            "model.dtype; a server needs `--logprobs-mode processed_logprobs` if the temperature "
            "is not 1; or set model.use_vllm to false"
        )
    return gap


def active_adapters(model: Any) -> dict[str, BaseTunerLayer]:
    """The adapter layers by name; empty where they are disabled, as in the reference."""
    return {
        name: layer
        for name, layer in unwrap_peft(model).named_modules()
        if isinstance(layer, BaseTunerLayer) and not layer.disable_adapters
    }


def why_merged(backend: Backend, adapters: Mapping[str, Any]) -> str:
    """Why adapter layers cannot be handed over; empty if they can."""
    if not backend.max_lora_rank:
        return backend.why_merged
    for name, layer in adapters.items():
        if not isinstance(layer.get_base_layer(), torch.nn.Linear):
            return f"vLLM reads adapters of linear layers alone, and {name} is none"
    if (rank := rank_of(adapters)) > backend.max_lora_rank:
        return f"their rank {rank} is above {backend.max_lora_rank}, for which vLLM was started"
    return ""


def rank_of(adapters: Mapping[str, Any]) -> int:
    """The highest rank of adapter layers; 0 without any."""
    return max((max(layer.r.values()) for layer in adapters.values()), default=0)


def base_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters without those of adapters."""
    for name, parameter in unwrap_peft(model).named_parameters():
        if "lora_" not in name:
            yield name, parameter


def named_weights(model: Any, merged: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The weights under transformers' names, with the `merged` adapters added.

    peft would add them in place and subtract them again, which changes bfloat16 weights. Here the
    sum is a new tensor, computed in float32 and rounded once to the type of the weight.
    """
    for name, parameter in base_parameters(model):
        layer_name, weight = name.removesuffix(".base_layer.weight"), parameter.detach()
        if layer_name in merged:
            layer = merged[layer_name]
            for adapter in layer.active_adapters:
                weight = weight.float() + layer.get_delta_weight(adapter).float()
        yield name.replace(".base_layer", ""), weight.to(parameter.dtype)
