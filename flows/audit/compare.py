"""Two language models on the same prompts, whoever trained them: win rates of B against A by the
judges, KL from a reference, and the comparison at equal KL.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urldefrag

import requests
import torch

from flows.audit.inputs import Prompts, read_responses
from flows.audit.subjects import CHAT, LANGUAGE_MODEL, check_kind
from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import file_hash, read_json
from stages.lib.core.hub import model_folder
from stages.lib.core.params import Params
from stages.lib.core.progress import print_line, progress
from stages.lib.core.reading import parse_json
from stages.lib.core.types import Metrics, Prompt
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.lm.interpolation import interpolate, search_scale
from stages.lib.lm.loading import load_any_tokenizer, load_policy
from stages.lib.lm.lora import is_adapter
from stages.lib.lm.responses import Response, responder
from stages.lib.lm.saving import policy_weights
from stages.lib.metrics.stats import paired_bootstrap, prompts_needed, with_interval
from stages.lib.metrics.text import distinct_n, repetition_n

A, B, REFERENCE = "A", "B", "reference"
REQUESTS = 4  # in parallel


@dataclass
class Answers:
    """A model's responses, by pass and prompt. kls: nats per sequence from the reference, likewise;
    None: not known.
    """

    passes: list[list[Response]]
    kls: list[list[float]] | None = None
    judge_scores: dict[str, float] = field(default_factory=dict)  # means, by judge

    @property
    def kl(self) -> float | None:
        return None if self.kls is None else fmean(kl for one in self.kls for kl in one)


@dataclass(frozen=True)
class LocalModel:
    """A language model in a folder, or an adapter on the model in `base`."""

    folder: Path
    base: Path
    params: Params

    @cached_property
    def tokenizer(self) -> Any:
        """An adapter's folder may have none."""
        has_own = (self.folder / "tokenizer_config.json").exists()
        return load_any_tokenizer(self.folder if has_own else self.base)

    def load(self) -> Any:
        return load_policy(self.base, self.folder, self.params.model)


def find_model(named: str, option: str, reference: str | None, params: Params) -> LocalModel:
    """A model by a folder or its name on the hub; of an adapter, the base is the reference, or the
    folder that its config names.

    Raises:
        BadInput: there is none, or an adapter's base is not here.
        Unreachable: it is on the hub, which cannot be reached.
    """
    folder = model_folder(named, option)
    if not is_adapter(folder):
        if not (folder / "config.json").exists():
            raise BadInput(f"{folder}: no config.json: expected the folder of a language model")
        check_kind(folder, LANGUAGE_MODEL)
        return LocalModel(folder, folder, params)
    base = Path(reference or read_json(folder / "adapter_config.json")["base_model_name_or_path"])
    if not (base / "config.json").exists():
        raise BadInput(f"{folder}: an adapter of {base}, which is no folder here: add --reference")
    return LocalModel(folder, base, params)


class Contest:
    """Answers of A, B and the reference to the prompts.

    Args:
        named: A and B; each a folder, a model of the hub, a file with responses, or
            `http://.../v1#MODEL`.
        reference: a folder or a model of the hub; None: there is no KL.
    """

    def __init__(
        self,
        named: tuple[str, str],
        reference: str | None,
        prompts: Prompts,
        jury: Jury,
        params: Params,
    ) -> None:
        self.prompts, self.jury, self.params = prompts.prompts, jury, params
        self.samples, self.slices = params.evaluate.samples_per_prompt, prompts.slices
        self.reference = find_model(reference, "--reference", None, params) if reference else None
        self.models = dict[str, LocalModel]()
        self.elsewhere = dict[str, str]()
        for name, one in zip((A, B), named, strict=True):
            if "://" in one or Path(one).is_file():
                self.elsewhere[name] = one
            else:
                path = str(self.reference.folder) if self.reference else None
                self.models[name] = find_model(one, name, path, params)
        self.answers = dict[str, Answers]()

    @cached_property
    def reference_model(self) -> Any:
        assert self.reference
        return self.reference.load()

    def run(self) -> Metrics:
        """Sample, compare, and compare at equal KL where both have one and one can be scaled."""
        for name, one in self.elsewhere.items():
            self.answers[name] = Answers(self.from_elsewhere(one))
        if self.reference:
            with progress("responses of the reference"):
                self.answers[REFERENCE] = self.sample(self.reference, self.reference_model)
        for name, model in self.models.items():
            if self.is_reference(name):
                self.answers[name] = self.answers[REFERENCE]
                continue
            with progress(f"responses of {name}"):
                self.answers[name] = self.sample(model, model.load())
        for answers in self.answers.values():
            self.judge(answers)
        metrics: Metrics = {name: self.describe(answers) for name, answers in self.answers.items()}
        metrics["B_against_A"] = self.win_rates(self.answers[B], self.answers[A])
        if self.reference:
            for name in (name for name in (A, B) if not self.is_reference(name)):
                against = self.win_rates(self.answers[name], self.answers[REFERENCE])
                metrics[f"{name}_against_reference"] = against
        return metrics | {"equal_kl": self.at_equal_kl()}

    def is_reference(self, name: str) -> bool:
        """Whether A or B is the reference itself, which answers once."""
        model = self.models.get(name)
        return bool(self.reference and model and model.folder == self.reference.folder)

    def sample(self, model: LocalModel, loaded: Any) -> Answers:
        """Responses with the same random numbers for all models; KL if the tokens are the
        reference's.
        """
        respond = responder(self.params, model.tokenizer)
        numbers = [self.params.seed * 1000 + number for number in range(self.samples)]
        passes = [respond(loaded, self.prompts, number) for number in numbers]
        if not self.has_tokens_of_reference(model):
            return Answers(passes)
        base = self.reference_model
        policy = None if loaded is base else loaded
        scored = [
            respond.scored(self.prompts, one, policy, lambda: nullcontext(base)) for one in passes
        ]
        return Answers(passes, [[response.kl for response in one] for one in scored])

    def has_tokens_of_reference(self, model: LocalModel) -> bool:
        if not self.reference:
            return False
        vocabularies = (one.tokenizer.get_vocab() for one in (model, self.reference))
        return bool(next(vocabularies) == next(vocabularies))

    def from_elsewhere(self, named: str) -> list[list[Response]]:
        """Responses that a file has or a server gives; their tokens are not known."""
        if "://" in named:
            texts = self.from_server(named)
        else:
            texts = read_responses(named, self.prompts, self.samples)
        return [[Response([], [], text, ended=True) for text in one] for one in texts]

    def from_server(self, named: str) -> list[list[str]]:
        url, model = urldefrag(named)
        if not url.rstrip("/").endswith(CHAT) or not model:
            raise BadInput(f"{named}: expected http://HOST{CHAT}#MODEL, a chat completions server")
        url, key = url.rstrip("/"), self.params.annotate.endpoint.api_key_env
        session = http_session.retrying_session(url, key)
        ask = partial(chat_completion, session, url, model, self.params)
        with ThreadPoolExecutor(REQUESTS) as threads, progress(f"responses of {model}"):
            return [
                list(threads.map(partial(ask, number=number), self.prompts))
                for number in range(self.samples)
            ]

    def judge(self, answers: Answers) -> None:
        """The mean score by each judge that scores."""
        texts = [response.text for one in answers.passes for response in one]
        for name, judge in self.jury.judges.items():
            if scores := judge.scores(self.prompts * self.samples, texts):
                answers.judge_scores[name] = fmean(scores)

    def describe(self, answers: Answers) -> dict[str, float | None]:
        """Means over all responses; length in tokens, which responses from elsewhere have not."""
        responses = [response for one in answers.passes for response in one]
        sampled = all(response.tokens for response in responses)
        texts = [[response.text for response in one] for one in answers.passes]
        return {
            "kl": answers.kl,
            "length": fmean(len(one.tokens) for one in responses) if sampled else None,
            "words": fmean(len(response.text.split()) for response in responses),
            "eos_rate": fmean(one.ended for one in responses) if sampled else None,
            "distinct_2": fmean(distinct_n(one, 2) for one in texts),
            "repetition_3": fmean(repetition_n(response.text, 3) for response in responses),
            **{f"score_{name}": score for name, score in answers.judge_scores.items()},
        }

    def win_rates(self, first: Answers, second: Answers) -> Metrics:
        """Of the first against the second, a tie is half: by the jury (`win_rate`), by each judge
        and in each slice, with 95% intervals over prompts; and how many prompts would decide.
        """
        votes = self.jury.compare(
            [
                Comparison(prompt, x.text, y.text)
                for one, other in zip(first.passes, second.passes, strict=True)
                for prompt, x, y in zip(self.prompts, one, other, strict=True)
            ]
        )
        number, together = len(self.prompts), votes.pop(JURY)
        resamples, seed = self.params.evaluate.bootstrap_resamples, self.params.seed

        def interval(outcomes: Sequence[float], of: Sequence[int]) -> tuple[float, float, float]:
            return paired_bootstrap([outcomes[i::number] for i in of], resamples, seed)

        whole = interval(together, range(number))
        metrics: Metrics = with_interval("win_rate", whole)
        metrics |= {"prompts_needed": prompts_needed(number, *whole), "outcomes": together}
        for name, outcomes in votes.items():
            metrics |= with_interval(f"win_rate_{name}", interval(outcomes, range(number)))
        by_slice: dict[str, list[int]] = {}
        for i, name in enumerate(self.slices):
            by_slice.setdefault(name, []).append(i)
        metrics["slices"] = {
            name: {**with_interval("win_rate", interval(together, of)), "prompts": len(of)}
            for name, of in by_slice.items()
            if len(by_slice) > 1
        }
        return metrics

    def at_equal_kl(self) -> Metrics:
        """B against A after the one with more KL is scaled towards the reference, until its KL is
        the other's; or why not.
        """
        kls = {name: self.answers[name].kl for name in (A, B)}
        if None in kls.values():
            return {"not_measured": "KL needs --reference, and models with its tokens"}
        known = {name: kl for name, kl in kls.items() if kl is not None}
        if min(known.values()) <= 0:
            return {"not_measured": "one of them is the reference"}
        further = max(known, key=known.__getitem__)
        model, base = self.models[further].load(), self.reference_model
        if not hasattr(model, "peft_config") and not same_shapes(model, base):
            return {"not_measured": f"{further} has other weights than the reference"}
        trained, scaled = policy_weights(model), dict[float, Answers]()

        def measure_kl(scale: float) -> float:
            interpolate(model, lambda: nullcontext(base), trained, scale)
            scaled[scale] = self.sample(self.models[further], model)
            print_line(f"{further} scaled by {scale:.3f}: KL {scaled[scale].kl or 0:.2f}")
            return scaled[scale].kl or 0.0

        *_, (scale, kl) = search_scale(measure_kl, (1.0, known[further]), min(known.values()))
        both = {name: self.answers[name] for name in (A, B)}
        if scale != 1:
            both[further] = scaled[scale]
        return {"scaled": further, "scale": scale, "kl": kl, **self.win_rates(both[B], both[A])}


def same_shapes(model: torch.nn.Module, base: torch.nn.Module) -> bool:
    shapes = ({name: p.shape for name, p in one.named_parameters()} for one in (model, base))
    return next(shapes) == next(shapes)


def chat_completion(
    session: requests.Session, url: str, model: str, params: Params, prompt: Prompt, number: int
) -> str:
    """The answer of a chat completions server, sampled as our own models are.

    Raises:
        RondoError: it does not answer, or with something else.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    request = {
        "model": model,
        "messages": messages,
        "temperature": params.ppo.temperature,
        "max_tokens": params.ppo.response_length,
        "seed": params.seed * 1000 + number,
    }
    timeout = params.annotate.endpoint.timeout
    try:
        reply = session.post(f"{url}/chat/completions", json=request, timeout=timeout, stream=True)
        content = http_session.read_body(reply, timeout)
        reply.raise_for_status()
        choice = parse_json(content)["choices"][0]
        return str(choice["message"]["content"] or "")
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        raise RondoError(
            f"{url}: no chat completion of {model}: {error!r:.300}; start its server, or raise "
            "--set annotate.endpoint.timeout"
        ) from None


def identities(contest: Contest) -> Mapping[str, str]:
    """What was compared: sha256 of folders and files, and addresses."""
    folders = {name: model.folder for name, model in contest.models.items()}
    if contest.reference:
        folders[REFERENCE] = contest.reference.folder
    elsewhere = {
        name: one if "://" in one else file_hash(Path(one))
        for name, one in contest.elsewhere.items()
    }
    return {name: file_hash(folder) for name, folder in folders.items()} | elsewhere
