"""A language model as judge, behind OpenAI's chat completions protocol: OpenAI, vLLM, Ollama,
llama.cpp, and what else speaks it.

The API key is read from the environment and goes to the server alone: into no file, log or message.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import openai
from openai.types.chat import ChatCompletion

from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.files import JUDGE_CACHE
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.types import Row
from stages.lib.data.prompts import transcript
from stages.lib.judging.answer_cache import Answer, AnswerCache
from stages.lib.judging.pairwise import Comparison, Verdict
from stages.lib.judging.rubric import answer_format, parse_verdict, system_prompt

ASKED_AGAIN = 2  # times at most, where an answer cannot be read
SHOWN = 300  # characters of a server's error
NO_KEY = "no-key"  # the client wants one; servers of one's own do not
QUESTION = """<prompt>
{prompt}
</prompt>
<response_A>
{a}
</response_A>
<response_B>
{b}
</response_B>"""
AGAIN = "That cannot be read: {fault}. Answer with one JSON object and nothing else: {form}"

Messages = list[dict[str, str]]


@dataclass
class Usage:
    """calls: answers that were asked for now; cached: those known from before. Tokens: of all of
    them, and of the calls.
    """

    calls: int = 0
    cached: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    paid_tokens_in: int = 0
    paid_tokens_out: int = 0

    def add(self, answer: Answer, paid: bool) -> None:
        self.calls += paid
        self.cached += not paid
        self.tokens_in += answer.tokens_in
        self.tokens_out += answer.tokens_out
        self.paid_tokens_in += paid * answer.tokens_in
        self.paid_tokens_out += paid * answer.tokens_out


class EndpointJudge:
    """Asks `params.model` at temperature 0; every answer is kept in `cache`."""

    def __init__(
        self, params: EndpointParams, cache: Path = JUDGE_CACHE, key: str = "annotate.endpoint"
    ) -> None:
        """key: where in params.yaml these params are, for messages."""
        self.where, self.params, self.answers, self.spent, self.lock = (
            key,
            params,
            AnswerCache(cache),
            Usage(),
            Lock(),
        )
        self.key = os.environ.get(params.api_key_env) or NO_KEY
        self.client = openai.OpenAI(
            base_url=params.base_url,
            api_key=self.key,
            max_retries=params.max_retries,
            timeout=params.timeout,
        )

    def describe(self) -> Row:
        return {"judge": "endpoint", "model": self.params.model}

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """
        Raises:
            BadInput: the server refuses the key, or does not know the model.
            Unreachable: it gives no answer for now; those given so far are kept.
            RondoError: what it gives is none.
        """
        pool = ThreadPoolExecutor(self.params.concurrency)
        try:
            return list(pool.map(self._verdict, comparisons))
        finally:
            pool.shutdown(cancel_futures=True)

    def cost(self) -> Row:
        spent = self.spent
        return {
            "answers": spent.calls + spent.cached,
            "tokens_in": spent.tokens_in,
            "tokens_out": spent.tokens_out,
            "cost": self._price(spent.tokens_in, spent.tokens_out),
        }

    def usage(self) -> Row:
        return asdict(self.spent) | {
            "paid": self._price(self.spent.paid_tokens_in, self.spent.paid_tokens_out)
        }

    def _price(self, tokens_in: int, tokens_out: int) -> float | None:
        """None where a price is unknown."""
        price_in, price_out = (
            self.params.price_per_million_input,
            self.params.price_per_million_output,
        )
        return (
            None
            if price_in is None or price_out is None
            else (tokens_in * price_in + tokens_out * price_out) / 1e6
        )

    def _verdict(self, comparison: Comparison) -> Verdict | None:
        """Asked again with the fault named where the answer cannot be read; None where that does
        not help.
        """
        messages = self._question(comparison)
        for _ in range(1 + ASKED_AGAIN):
            text = self._answer(messages)
            try:
                return parse_verdict(text, self.params.rubric)
            except ValueError as fault:
                again = AGAIN.format(fault=fault, form=answer_format(self.params.rubric))
                messages = [
                    *messages,
                    {"role": "assistant", "content": text or "(nothing)"},
                    {"role": "user", "content": again},
                ]
        return None

    def _question(self, comparison: Comparison) -> Messages:
        prompt = (
            comparison.prompt
            if isinstance(comparison.prompt, str)
            else transcript(comparison.prompt).strip()
        )
        return [
            {"role": "system", "content": system_prompt(self.params.rubric)},
            {
                "role": "user",
                "content": QUESTION.format(prompt=prompt, a=comparison.a, b=comparison.b),
            },
        ]

    def _answer(self, messages: Messages) -> str:
        most = self.params.max_completion_tokens
        asked = {
            "model": self.params.model,
            "messages": messages,
            "temperature": 0,
            "max_completion_tokens": most,
        }
        key = hashlib.sha256(
            json.dumps({**asked, "server": self.params.base_url}, sort_keys=True).encode()
        ).hexdigest()
        known = self.answers.get(key)
        answer = known or self.answers.put(key, self._call(asked))
        with self.lock:
            self.spent.add(answer, paid=known is None)
        return answer.text

    def _call(self, asked: dict[str, Any]) -> Answer:
        try:
            told = self.client.chat.completions.create(**asked)
        except openai.OpenAIError as error:
            self._refuse(error)
        except json.JSONDecodeError:
            told = None
        if not isinstance(told, ChatCompletion) or not told.choices or not told.choices[0].message:
            raise RondoError(
                f"{self.where}.base_url {self.params.base_url}: no chat completion came back; it usually ends in /v1. "
                "Correct it and run the stage again"
            )
        counted = told.usage
        return Answer(
            told.choices[0].message.content or "",
            counted.prompt_tokens if counted else 0,
            counted.completion_tokens if counted else 0,
        )

    def _refuse(self, error: openai.OpenAIError) -> NoReturn:
        """Name what has to be changed, and the next step. A server may quote the API key: it is cut
        out.
        """
        params, said = self.params, str(error).replace(self.key, "***")[:SHOWN]
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            held = "refused" if self.key != NO_KEY else "not set"
            raise BadInput(
                f"{self.where}.api_key_env {params.api_key_env}: the key in this environment variable is {held} ({said}); export one "
                f"that {params.base_url} takes and run the stage again"
            ) from None
        if isinstance(error, openai.NotFoundError):
            raise BadInput(
                f"{self.where}.model {params.model}: {params.base_url} does not have it ({said}); its models are listed at "
                f"{params.base_url}/models; it may also be that {self.where}.base_url lacks its /v1"
            ) from None
        if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
            raise BadInput(
                f"{self.where}.model {params.model}: {params.base_url} does not take the question ({said}), which may be too long for "
                "it, or its temperature of 0 unknown to it; choose another model"
            ) from None
        passing = isinstance(
            error, openai.APIConnectionError | openai.RateLimitError | openai.InternalServerError
        )
        raise (Unreachable if passing else RondoError)(
            f"{self.where}.base_url {params.base_url}: no answer after up to {params.max_retries} more tries ({said}); start the "
            f"server, or, where it is slow or overrun, raise {self.where}.timeout or lower {self.where}.concurrency, and run the "
            "stage again: what was answered is kept"
        ) from None
