"""The peak memory of each stage, from the model's shape, the params and the lengths of texts.

A number has 2 bytes in bfloat16 and 4 in float32. A stage holds the weights of its models; on top
comes the largest of its phases:

- Training keeps, per token and trained layer, what the backward pass reads (`kept_per_token`). With
  gradient checkpointing it keeps one state per token and layer, and the rest of one layer at a
  time. Attention is computed again in the backward pass, except `eager`, which keeps its weights.
- A trained weight is float32, with a gradient and Adam's two moments: 16 bytes.
- Logits exist in pieces (stages/lib/lm/logprobs.py), each beside its gradient or the reference's.
- Merging holds the old weights, float32 weights and merged ones.
- Sampling holds keys and values (stages/lib/lm/generation.py), those of prompts in two layouts.

docs/performance.md compares the result with measured peaks.
"""

from dataclasses import dataclass
from pathlib import Path

from flows.execution.model_shape import ModelShape, read_shape
from flows.execution.text_lengths import Batch, TextLengths, Texts
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import FLUENCY, HELD_OUT_REWARD_MODEL
from stages.lib.core.params.judging import Annotator
from stages.lib.core.params.policy import Algorithm, Critic, Engine
from stages.lib.core.params.shared import LoraParams

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}
# Interpreter and libraries: in RAM measured; of a GPU, the size of a CUDA context (not measured)
LIBRARIES = {"cpu": 0.48e9, "cuda": 0.6e9}
# Memory per byte of activations: the heap loses room between tensors of different sizes. Measured
# on a CPU; on a GPU not.
HEAP = {"cpu": 1.6, "cuda": 1.1}
# Share of a pass that stays in the heap during another kind of pass: set with whole runs
HEAP_KEEPS = {"cpu": 0.5, "cuda": 0.0}
ADAM_BYTES = 16  # per trained weight: weight, gradient, two moments, in float32
FLOAT = 4
LOGITS = 2  # pieces of logits at once
FRESH_PROMPTS = 96  # of replay
UNKNOWN_PROMPTS = 4096  # prompts to train on before prepare has counted them


@dataclass(frozen=True)
class Limits:
    """What stages/lib/lm allows on a device: cells of a piece of logits, bytes of a cache of keys
    and values, tokens of a pass without gradients.
    """

    piece: int
    cache: float
    tokens: int


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of the phases of stages that work with one model.

    number: bytes per number. attention: transformers' name of the implementation.
    """

    shape: ModelShape
    number: int
    device: str
    attention: str
    limits: Limits

    @property
    def weights(self) -> float:
        return float(self.shape.weights * self.number)

    def trained(self, lora: LoraParams) -> float:
        """Adapters; or all weights, beside those that the passes compute with."""
        weights = self.shape.adapter_weights(lora) if lora.r else self.shape.weights
        return float(weights * ADAM_BYTES)

    def kept_per_token(self, full: bool = False) -> float:
        """Bytes that one layer keeps per token for the backward pass.

        The input of two norms in float32 and their results; queries, keys and values before and
        after their rotation; the result of attention; input, gate and product of the MLP. All
        weights trained (`full`): also the norms' results before their weights, in float32.
        """
        shape = self.shape
        queries, keys = shape.heads * shape.head_size, shape.key_heads * shape.head_size
        norms = shape.hidden * 2 * (FLOAT * (2 if full else 1) + self.number)
        attention = 2 * (queries + 2 * keys) * self.number + queries * self.number
        mlp = (4 if shape.gated else 2) * shape.inner * self.number
        return float(norms + attention + mlp)

    def attention_weights(self, batch: Batch, backward: bool) -> float:
        """The (rows, heads, L, L) weights of one layer; FlashAttention and sdpa have none."""
        if self.attention not in ("grouped", "eager"):
            return 0.0
        copies = FLOAT + 2 * self.number
        return batch.rows * self.shape.heads * batch.longest**2 * copies * (2 if backward else 1)

    def padded(self, batch: Batch) -> float:
        """Tokens that the layers compute: with padding, if attention cannot run rows end to end."""
        packs = self.attention in ("grouped", "flash_attention_2")
        return batch.tokens if packs else batch.rows * batch.longest

    def kept(self, batch: Batch, lora: LoraParams, checkpointing: bool) -> float:
        """What the backward pass reads of a forward pass."""
        tokens, layers = self.padded(batch), self.shape.trained_layers(lora)
        if checkpointing:
            return tokens * layers * self.shape.hidden * self.number
        weights = self.attention_weights(batch, backward=False) if self.attention == "eager" else 0
        return layers * (tokens * self.kept_per_token(lora.r == 0) + weights)

    def one_layer(self, batch: Batch, lora: LoraParams, checkpointing: bool) -> float:
        """What the backward pass of one layer needs on top: its gradients and attention weights,
        and with gradient checkpointing its activations.
        """
        layer = self.padded(batch) * self.kept_per_token(lora.r == 0)
        return layer * (2 if checkpointing else 1) + self.attention_weights(batch, backward=True)

    def logits(self, tokens: float) -> float:
        cells = min(tokens * self.shape.vocabulary, self.limits.piece)
        return LOGITS * max(cells, self.shape.vocabulary) * self.number

    def scoring(self, texts: int, longest: float) -> float:
        """A pass without gradients over `texts` texts, in batches of `limits.tokens`."""
        rows = max(min(texts, int(self.limits.tokens // max(longest, 1))), 1)
        batch = Batch(rows, rows * longest, longest)
        layer = self.padded(batch) * self.kept_per_token()
        layer += self.attention_weights(batch, backward=False)
        return HEAP[self.device] * layer + self.logits(batch.tokens)

    def sampling(self, rows: int, prompt: float, response: int) -> float:
        """Of a batch the prefill, with the prompts' keys and values in two layouts, or all keys and
        values; and its next tokens' logits.
        """
        per_token = self.shape.cached_numbers * self.number
        rows = max(min(rows, int(self.limits.cache // (per_token * (prompt + response)))), 1)
        batch = Batch(rows, rows * prompt, prompt)
        prefill = batch.tokens * (2 * per_token + self.kept_per_token()) + self.attention_weights(
            batch, backward=False
        )
        cache = rows * (prompt + response) * per_token
        return max(prefill, cache) + rows * self.shape.vocabulary * (self.number + FLOAT)

    def training(
        self, batch: Batch, lora: LoraParams, checkpointing: bool, head_tokens: float
    ) -> float:
        """A training step, without the model's own weights.

        Args:
            batch: the texts of a micro-batch.
            lora: what is trained.
            checkpointing: gradient checkpointing.
            head_tokens: tokens whose logits are computed.
        """
        return self.trained(lora) + self.backward(
            self.kept(batch, lora, checkpointing), batch, lora, checkpointing, head_tokens
        )

    def backward(
        self, kept: float, batch: Batch, lora: LoraParams, checkpointing: bool, head_tokens: float
    ) -> float:
        """A backward pass with `kept` bytes of activations, from the head or in a layer."""
        heap = HEAP[self.device]
        logits = self.logits(head_tokens) if head_tokens else 0.0
        return kept * heap + max(logits, heap * self.one_layer(batch, lora, checkpointing))

    def merging(self) -> float:
        return float(self.shape.weights * (FLOAT + self.number))

    def by_turns(self, *passes: float) -> float:
        """Passes one after the other, each with its own tensors: the heap keeps a share of the
        others during the largest.
        """
        largest = max(passes)
        return largest + HEAP_KEEPS[self.device] * (sum(passes) - largest)


def stage_memory(params: Params, lengths: TextLengths, model: MemoryModel) -> dict[str, float]:
    """Peak bytes of each stage that runs a model."""
    reward, ppo = params.reward, params.ppo
    members = model.weights * reward.ensemble
    primary, judges = (
        _judges(model, named) for named in (params.evaluate.judges[:1], params.evaluate.judges)
    )
    second = _judges(model, [HELD_OUT_REWARD_MODEL]) if reward.judge_share else 0.0
    # an adapter is on an SFT model of its own
    policy = model.weights * (1 if ppo.lora.r else 2)

    def answers(rows: int) -> float:
        return _answers(params, lengths, model, rows)

    def turns(rows: int) -> float:
        """Several models sample and score by turns."""
        return model.by_turns(*_sampled_and_scored(params, lengths, model, rows))

    held = {
        "sft": _sft(params, lengths, model, primary),
        "reward": _reward(params, lengths, model),
        "battery": model.weights
        + members
        + primary
        + second
        + answers(params.battery.prompts * max(params.battery.best_of)),
        "ppo": (0.0 if ppo.reward_url else members * _held_share(params, model))
        + primary
        + _policy(params, lengths, model),
        # base, SFT and the first round's SFT
        "evaluate": 3 * model.weights + policy + members + judges + turns(lengths.evaluation),
        "capability": _capability(params, lengths, model, policy),
        "replay": policy + members + judges + turns(_replay_rows(params)),
    }
    annotate = params.annotate
    if annotate.annotator is Annotator.judge or annotate.revisions:
        rows = annotate.prompts * annotate.samples + annotate.revisions
        held["annotate"] = model.weights + primary + answers(rows)
    held = {stage: LIBRARIES[model.device] + size for stage, size in held.items()}
    if model.device == "cpu":  # where all processes share the memory
        held = {stage: size * params.processes(stage) for stage, size in held.items()}
    return held


def _of_one_process(params: Params, stage: str, rows: int) -> int:
    """The most rows of a batch that one of the processes of a stage has."""
    return -(-rows // params.processes(stage))


def _held_share(params: Params, model: MemoryModel) -> float:
    """The share of each of PPO's models that a process holds."""
    if not params.launcher.shard:
        return 1.0
    divided = model.shape.layer_weights / model.shape.weights
    return 1 - divided * (1 - 1 / params.processes("ppo"))


def _sft(params: Params, lengths: TextLengths, model: MemoryModel, judge: float) -> float:
    sft = params.sft
    own = _of_one_process(params, "sft", sft.per_device_train_batch_size)
    batch = lengths.demonstrations.longest(own)
    prompts = batch.rows * lengths.prompts.random(batch.rows).tokens / batch.rows
    responses = max(batch.tokens - prompts, batch.rows)
    text = lengths.demonstrations.longest(1).longest
    # the base model is sampled and scored before the training, and the SFT model after it
    rows = lengths.evaluation * sft.samples_per_prompt
    sampling, scoring = _sampled_and_scored(params, lengths, model, rows)
    passes = sampling, max(scoring, model.scoring(model.limits.tokens, text))
    training = model.training(batch, sft.lora, sft.gradient_checkpointing, responses)
    return max(
        model.weights + model.by_turns(training, *passes),
        # the saved model is loaded again to be measured, beside the merged one
        model.merging() + model.weights,
        2 * model.weights + judge + model.by_turns(*passes),
    )


def _reward(params: Params, lengths: TextLengths, model: MemoryModel) -> float:
    """Further members and the judge, trained before, stay in memory."""
    reward = params.reward
    own = _of_one_process(params, "reward", reward.per_device_train_batch_size)
    batch = _hard(lengths.pairs, own, reward.hard_negatives)
    others = model.weights * (reward.ensemble - 1 + (reward.judge_share > 0))
    scoring = model.scoring(model.limits.tokens, batch.longest)
    training = model.training(batch, reward.lora, reward.gradient_checkpointing, 0)
    return others + max(model.weights + model.by_turns(training, scoring), model.merging())


def _hard(pairs: Texts, rows: int, hard_negatives: float) -> Batch:
    """The longest pairs. Hard negatives are longest: a text and its corruption, of one length."""
    batch = pairs.longest(rows)
    if not hard_negatives:
        return batch
    longest = sorted((max(row) for row in pairs.fitting), reverse=True)[:rows]
    return Batch(batch.rows, 2 * sum(longest) if longest else batch.tokens, batch.longest)


def _policy(params: Params, lengths: TextLengths, model: MemoryModel) -> float:
    """The stage ppo, without the reward model that stays as it is."""
    ppo = params.ppo
    rewards = [source.model for source in ppo.rewards if source.model]
    share = _held_share(params, model)
    held = model.weights * (1 if ppo.lora.r else 2) * share + _judges(model, rewards)
    rows = max(ppo.validation_prompts, ppo.batch_size)
    if ppo.engine is not Engine.local:  # its policies are sampled and scored here
        return held + model.by_turns(*_sampled_and_scored(params, lengths, model, rows))
    if params.algorithm is Algorithm.ppo:
        prompt = lengths.prompts.longest(1).longest
        # of a sharded policy, the rest of its layers is there while it samples
        sampling = model.sampling(rows, prompt, ppo.response_length) + model.weights * (1 - share)
        return held + _ppo(params, lengths, model, sampling)
    if params.algorithm is Algorithm.best_of_n:
        rows = max(rows, params.best_of_n.n * (len(lengths.prompts.rows) or UNKNOWN_PROMPTS))
    passes = _sampled_and_scored(params, lengths, model, rows)
    return held + model.by_turns(_alternative(params, lengths, model), *passes)


def _ppo(params: Params, lengths: TextLengths, model: MemoryModel, sampling: float) -> float:
    ppo = params.ppo
    own = _of_one_process(params, "ppo", ppo.batch_size)
    batch, micro = (
        lengths.prompts.random(rows, ppo.response_length + 1)
        for rows in (own, min(ppo.micro_batch_size, own))
    )
    critic, recompute = ppo.critic is Critic.reward, ppo.gradient_checkpointing
    # the states below the adapters of policy and critic, of all episodes
    states = batch.tokens * model.shape.hidden * model.number * (1 + critic) * (ppo.lora.r > 0)
    head_tokens = micro.rows * ppo.response_length
    trained = model.trained(ppo.lora) + (model.trained(ppo.critic_lora) if critic else 0)
    frozen = model.weights if critic and not ppo.critic_lora.r else 0.0
    trained, frozen = (size * _held_share(params, model) for size in (trained, frozen))
    passes = [ppo.lora, *([ppo.critic_lora] if critic else [])]
    kept = [model.kept(micro, lora, recompute) for lora in passes]
    # if a micro-batch is all of them, its passes serve the first step: both are kept
    serves = ppo.micro_batch_size >= own and ppo.mini_batch_size == ppo.batch_size
    activations = sum(kept) if serves else max(kept)
    step = states + model.backward(activations, micro, ppo.lora, recompute, head_tokens)
    if params.processes("ppo") > 1:  # the message with all gradients
        step = max(step, states + trained * FLOAT / ADAM_BYTES)
    # on a CPU the heap keeps what sampling freed, in parts too small for the activations
    both = step + sampling if model.device == "cpu" else max(step, sampling)
    return trained + frozen + both


def _alternative(params: Params, lengths: TextLengths, model: MemoryModel) -> float:
    """A training step of another algorithm."""
    ppo, algorithm = params.ppo, params.algorithm
    if algorithm is Algorithm.dpo:
        own = _of_one_process(params, "ppo", params.dpo.per_device_train_batch_size)
        batch = lengths.pairs.longest(own)
        tokens = batch.tokens
    else:
        best = algorithm is Algorithm.best_of_n
        rows = params.best_of_n.per_device_train_batch_size if best else ppo.micro_batch_size
        own = _of_one_process(params, "ppo", rows)
        batch = lengths.prompts.random(own, ppo.response_length)
        tokens = float(own * ppo.response_length)
    return model.training(batch, ppo.lora, ppo.gradient_checkpointing, tokens)


def _capability(params: Params, lengths: TextLengths, model: MemoryModel, policy: float) -> float:
    """SFT and policy, sampled on the prompts of slices/ and on the batches of tasks."""
    config, slice_prompts = params.capability, len(lengths.slices.rows)
    if not slice_prompts and not config.tasks:
        return 0.0
    prompts = lengths.slices if slice_prompts else lengths.prompts
    rows = max(slice_prompts, config.batch_size if config.tasks else 0)
    sampling = model.sampling(rows, prompts.longest(1).longest, config.response_length)
    return model.weights + policy + sampling


def _replay_rows(params: Params) -> int:
    """The most responses that replay samples at once: of the policy, candidates, or retests."""
    replay = params.replay
    retested = replay.max_badcases * max(replay.best_of, replay.tries)
    return max(FRESH_PROMPTS, retested, replay.policy_pairs * replay.best_of)


def _judges(model: MemoryModel, named: list[str]) -> float:
    """Weights of those judges or rewards that are models."""
    weights = 0.0
    for name in set(named):
        if name in (FLUENCY, HELD_OUT_REWARD_MODEL):
            weights += model.weights
        elif Path(name).is_dir() and (shape := read_shape(name)):
            weights += shape.weights * model.number
    return weights


def _answers(params: Params, lengths: TextLengths, model: MemoryModel, rows: int) -> float:
    """Responses to `rows` prompts, sampled, then scored."""
    return max(_sampled_and_scored(params, lengths, model, rows))


def _sampled_and_scored(
    params: Params, lengths: TextLengths, model: MemoryModel, rows: int
) -> tuple[float, float]:
    """Sampling of responses to `rows` prompts, and scoring them."""
    prompt, response = lengths.prompts.longest(1).longest, params.ppo.response_length
    return model.sampling(rows, prompt, response), model.scoring(rows, prompt + response)
