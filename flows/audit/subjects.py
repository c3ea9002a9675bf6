"""What can be audited or asked as a second judge: classifiers of transformers, functions, servers,
and language models as judges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch

from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RewardsFailed
from stages.lib.core.files import file_hash, metric_name
from stages.lib.core.hub import model_folder
from stages.lib.core.model_folders import read_config
from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.progress import tracked
from stages.lib.core.reading import parse_json
from stages.lib.core.types import Prompt, ScoreFunction, TokenIds
from stages.lib.core.user_functions import function_files, import_function
from stages.lib.data.prompts import encode, render_prompt
from stages.lib.judging.endpoint import EndpointJudge
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import PairwiseJudge
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.loading import load_config, load_sequence_classifier
from stages.lib.lm.lora import is_adapter
from stages.lib.lm.responses import Response
from stages.lib.lm.scoring import load_reading_tokenizer
from stages.lib.lm.world import batches_by_tokens
from stages.ppo.common.rewards import (
    TIMEOUT_SECONDS,
    TOKEN,
    FailedReward,
    FunctionReward,
    RewardInputs,
    RewardServer,
)

BATCH_TEXTS = 64  # of a request to a server
OPENRLHF, VLLM, CHAT = "/get_reward", "/classify", "/v1"


@dataclass(frozen=True)
class Subject:
    """What is audited, or asked as a second judge.

    named: as the user named it. kind: in words. identity: sha256 of its files, or its address.
    log_odds: whether a difference of two scores is the log-odds of a preference, as in a model that
    was trained on pairs (Bradley and Terry 1952). ask: makes a judge that has answered nothing yet;
    the argument is the folder of its answers, if it keeps some.
    """

    named: str
    kind: str
    identity: str
    log_odds: bool
    ask: Callable[[Path], PairwiseJudge]

    def judge(self, answers: Path) -> PrimaryJudge:
        return PrimaryJudge(metric_name(self.named), self.ask(answers))


def find_subject(named: str, params: Params) -> Subject:
    """What the user names: a folder, a model of the hub, `module:function`, an address that ends
    with /get_reward, /classify or /v1, or `lexicon`.

    Raises:
        BadInput: there is nothing of that name, or it is no reward model.
        Unreachable: it is on the hub, which cannot be reached.
    """
    if named == JudgeName.lexicon:
        margin = params.evaluate.tie_margin
        return Subject(named, "lexicon", named, False, lambda _: LexiconJudge(margin))
    if "://" in named:
        return served(named, params)
    if ":" in named and not Path(named).exists():
        function = FunctionReward(import_function(named, "MODEL or --judge"), named)
        function.check_columns([])
        digest = file_hash(function_files(named, named)[0])
        return scoring(named, "function", digest, False, partial(by_function, function))
    folder = model_folder(named, "audit-reward")
    model = Classifier(folder, params)
    return scoring(named, "reward model", file_hash(folder), True, model)


LANGUAGE_MODEL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def check_kind(folder: Path, wanted: str) -> None:
    """
    Raises:
        BadInput: the model in the folder is of the other of the two kinds.
    """
    other = CLASSIFIER if wanted == LANGUAGE_MODEL else LANGUAGE_MODEL
    for name in read_config(folder).get("architectures") or []:
        if name.endswith(other):
            raise BadInput(f"{folder}: its config.json says {name}, expected a ...{wanted}")


def scoring(named: str, kind: str, identity: str, log_odds: bool, score: ScoreFunction) -> Subject:
    return Subject(named, kind, identity, log_odds, lambda _: PointwiseJudge(named, score, 0.0))


def served(url: str, params: Params) -> Subject:
    """A server, by the protocol that the end of its address stands for."""
    path = url.rstrip("/")
    if path.endswith(OPENRLHF):
        server = RewardServer(url, url, partial(render_prompt, None, prompt_format=PLAIN))
        return scoring(url, "server", url, False, partial(by_function, server))
    if path.endswith(VLLM):
        return scoring(url, "server", url, False, partial(by_function, Classify(url)))
    if path.endswith(CHAT):
        endpoint = params.annotate.endpoint.model_copy(update={"base_url": url})
        if not endpoint.model or not endpoint.rubric:
            raise BadInput(
                f"{url}: which model, and by what? Add --set annotate.endpoint.model=NAME and "
                "--set annotate.endpoint.rubric='what makes a response better'"
            )
        identity = f"{endpoint.model} at {url}"
        return Subject(
            url, "judge", identity, False, lambda folder: EndpointJudge(endpoint, folder)
        )
    raise BadInput(
        f"{url}: expected an address that ends with {OPENRLHF} (OpenRLHF's protocol), {VLLM} "
        f"(vLLM's) or {CHAT} (a language model as judge)"
    )


PLAIN = PromptFormat.plain


def by_function(
    reward: Callable[[RewardInputs], Sequence[float | FailedReward]],
    prompts: Sequence[Prompt],
    responses: Sequence[str],
) -> list[float]:
    """Scores of a function or a server, in requests of BATCH_TEXTS.

    Raises:
        RewardsFailed: one of them failed; an audit with holes would be of other pairs.
    """
    scores: list[float] = []
    starts = range(0, len(prompts), BATCH_TEXTS)
    for start in tracked("scores", starts, len(starts), "requests"):
        part = slice(start, start + BATCH_TEXTS)
        inputs = RewardInputs(
            [{"id": str(start + i), "prompt": p} for i, p in enumerate(prompts[part])],
            [Response([], [], text, ended=True) for text in responses[part]],
        )
        for text, result in zip(responses[part], reward(inputs), strict=True):
            if isinstance(result, FailedReward):
                raise RewardsFailed(f"the reward of {text!r:.100} failed: {result.reason}")
            scores.append(result)
    return scores


class Classify:
    """Raw scores by vLLM's `/classify`, for a model with one class."""

    def __init__(self, url: str) -> None:
        self.url, self.session = url, http_session.retrying_session(url, TOKEN)

    def __call__(self, inputs: RewardInputs) -> list[float]:
        """
        Raises:
            RewardsFailed: the server does not answer, or not with one number per text.
        """
        texts = [
            render_prompt(None, prompt, PLAIN) + response
            for prompt, response in zip(inputs.prompts, inputs.texts, strict=True)
        ]
        try:
            response = self.session.post(
                self.url,
                json={"input": texts, "use_activation": False},
                timeout=TIMEOUT_SECONDS,
                stream=True,
            )
            content = http_session.read_body(response, TIMEOUT_SECONDS)
            response.raise_for_status()
            scores = [float(*row["probs"]) for row in parse_json(content)["data"]]
        except (requests.RequestException, ValueError, TypeError, KeyError) as error:
            raise RewardsFailed(
                f"{self.url}: {error!r:.300}; expected vLLM's /classify of a model with one "
                "class: data, a list of {probs: [number]}"
            ) from None
        if len(scores) != len(texts):
            raise RewardsFailed(f"{self.url}: {len(scores)} scores for {len(texts)} texts")
        return scores


class Classifier:
    """Raw scores of a sequence classifier with one label, by its own tokenizer and template and by
    transformers' own forward pass.

    A decoder reads prompt and response as one text: rendered by its chat template if
    `prepare.prompt_format` is chat (as TRL and Skywork train them), else with EOS at the end (as
    TRL and OpenRLHF do). An encoder, such as DeBERTa, reads them as a pair.

    Raises:
        BadInput: there is no such model, it has several labels, or it is an adapter.
    """

    def __init__(self, folder: Path, params: Params) -> None:
        if is_adapter(folder):
            raise BadInput(
                f"{folder}: an adapter of PEFT; merge it into its base model "
                "(`merge_and_unload`), save that with its tokenizer, and name its folder"
            )
        if not (folder / "config.json").exists():
            raise BadInput(f"{folder}: no config.json: expected the folder of a reward model")
        check_kind(folder, CLASSIFIER)
        if (labels := load_config(folder).num_labels) != 1:
            raise BadInput(
                f"{folder}: its config.json has {labels} labels; a reward model has one "
                '("num_labels": 1)'
            )
        self.model: Any = load_sequence_classifier(folder, params.model, new_head=False)
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        self.format = params.prepare.prompt_format
        self.tokenizer: Any = load_reading_tokenizer(folder, self.format)
        if self.format is not PLAIN and not self.tokenizer.chat_template:
            raise BadInput(
                f"{folder}: its tokenizer has no chat template, and the pairs are conversations: "
                "add --set prepare.prompt_format=plain, which makes them transcripts"
            )
        self.is_decoder = hasattr(self.model, "score")

    def encode(self, prompt: Prompt, response: str) -> TokenIds:
        if not self.is_decoder:
            text = render_prompt(self.tokenizer, prompt, PLAIN)
            return list(self.tokenizer(text, response).input_ids)
        prompt_ids, response_ids = encode(self.tokenizer, prompt, response, self.format)
        return prompt_ids + response_ids

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        rows = [self.encode(*texts) for texts in zip(prompts, responses, strict=True)]
        # transformers reads the score at the last token that is not this one
        last = {ids[-1] for ids in rows}
        pad = next(token for token in range(len(last) + 1) if token not in last)
        self.model.config.get_text_config().pad_token_id = self.model.config.pad_token_id = pad
        scores = [0.0] * len(rows)
        for batch in batches_by_tokens([*map(len, rows)], self.model.device, "scores"):
            longest = max(len(rows[i]) for i in batch)
            ids = [rows[i] + [pad] * (longest - len(rows[i])) for i in batch]
            mask = [[1] * len(rows[i]) + [0] * (longest - len(rows[i])) for i in batch]
            inputs = (torch.tensor(values, device=self.model.device) for values in (ids, mask))
            logits = self.model(**dict(zip(("input_ids", "attention_mask"), inputs, strict=True)))
            for i, score in zip(batch, logits.logits[:, 0].tolist(), strict=True):
                scores[i] = score
        return scores
