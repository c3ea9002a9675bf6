"""A client of OpenAI's chat completions protocol, with a cache of all answers that can be read.

OpenAI, vLLM, Ollama, llama.cpp and others support the protocol. The API key is read from the
environment and sent only to the servers that pyproject.toml lists for it; it is never written to a
file, log or message.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, NoReturn, TypeVar

import httpx2  # of the package openai
import openai
from pydantic import BaseModel, Field, ValidationError

from stages.lib.core.errors import (
    BadInput,
    RondoError,
    Unreachable,
    format_validation_errors,
)
from stages.lib.core.files import JUDGE_CACHE, json_hash
from stages.lib.core.http_session import EndlessReply, limited_chunks
from stages.lib.core.judge_answers import ANSWERS, name_cache
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.progress import progress
from stages.lib.core.project_limits import read_api_key
from stages.lib.core.types import Metrics

WAIT_SECONDS = 60  # for a lock that another process holds to write


class Answer(NamedTuple):
    """An answer with the tokens that the server counted; 0 if it does not count them."""

    text: str
    tokens_in: int
    tokens_out: int


class AnswerCache:
    """A table of answers by key, in a folder that threads and processes may share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = Lock()
        self.table = sqlite3.connect(
            folder / ANSWERS,
            timeout=WAIT_SECONDS,
            check_same_thread=False,
            isolation_level=None,
        )
        self.table.execute(
            "CREATE TABLE IF NOT EXISTS answers "
            "(key TEXT PRIMARY KEY, text TEXT, tokens_in INTEGER, tokens_out INTEGER)"
        )
        name_cache(self.table)

    def get(self, key: str) -> Answer | None:
        """The answer to a key, or None."""
        with self.lock:
            row = self.table.execute(
                "SELECT text, tokens_in, tokens_out FROM answers WHERE key = ?", (key,)
            ).fetchone()
        return Answer(*row) if row else None

    def put(self, key: str, answer: Answer) -> Answer:
        """Store an answer unless there is one already; return the stored one.

        Two threads may request the same answer at once: both then use the first one.
        """
        with self.lock:
            self.table.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (key, *answer))
        return self.get(key) or answer

    def remove(self, key: str) -> None:
        """Remove the answer to a key, if there is one."""
        with self.lock:
            self.table.execute("DELETE FROM answers WHERE key = ?", (key,))


# A compressed reply could unpack to any size
UNCOMPRESSED = {"Accept-Encoding": "identity"}


class LimitedTransport(httpx2.HTTPTransport):
    """Raises httpx2.ReadError for a reply that is too large, too slow, or compressed.

    Args:
        seconds: from the head of a reply to its end; httpx's own timeout is for each piece.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise httpx2.ReadError("the reply is compressed, which the request excludes")
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Limited(response.stream, self.seconds)
        return response


class _Limited(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream, seconds: float) -> None:
        self.stream, self.seconds = stream, seconds

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from limited_chunks(self.stream, self.seconds)
        except EndlessReply as error:
            raise httpx2.ReadError(str(error)) from None

    def close(self) -> None:
        self.stream.close()


UNREADABLE_RETRIES = 2  # further requests at most if an answer cannot be read
# A question without a readable answer is a tie: if most are, ties outweigh the judge's verdicts
MAX_UNREADABLE = 0.5
UNREADABLE_BEFORE_STOP = 16  # so many at least, to stop before all questions are asked
SHOWN = 300  # characters of a server's error or answer in a message
NO_KEY = "no-key"  # the client requires a key, local servers do not
# AGAIN is part of the cache's keys: another wording means new requests.
AGAIN = "That cannot be read: {fault}. Answer with one JSON object and nothing else: {form}"

Messages = list[dict[str, str]]
Item = TypeVar("Item")
Read = TypeVar("Read")


class Message(BaseModel):
    content: str | None = None


class Choice(BaseModel):
    message: Message


class TokenCounts(BaseModel):
    """As a server counts them; null: it does not."""

    prompt_tokens: int = Field(0, ge=0, lt=2**63)
    completion_tokens: int = Field(0, ge=0, lt=2**63)


class Completion(BaseModel):
    """What is read of a chat completion."""

    choices: list[Choice] = Field(min_length=1)
    usage: TokenCounts | None = None


@dataclass
class Usage:
    """Numbers of answers and tokens.

    calls: answers requested from the server. cached: answers found in the cache. tokens_in,
    tokens_out: tokens of all these answers. paid_tokens_in, paid_tokens_out: tokens of the calls.
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


class ChatClient:
    """Sends messages to a language model at temperature 0.

    Args:
        params: the endpoint's section of params.yaml.
        cache: folder in which all answers are kept.
        key: where params.yaml has that section, for messages.
    """

    def __init__(
        self, params: EndpointParams, cache: Path = JUDGE_CACHE, key: str = "annotate.endpoint"
    ) -> None:
        self.params, self.params_key = params, key
        self.answers = AnswerCache(cache)
        self.counts, self.lock = Usage(), Lock()
        self.questions, self.unreadable = 0, 0
        self.api_key = read_api_key(params.api_key_env, params.base_url or "") or NO_KEY
        self.client = openai.OpenAI(
            base_url=params.base_url,
            api_key=self.api_key,
            max_retries=params.max_retries,
            timeout=params.timeout,
            default_headers=UNCOMPRESSED,
            http_client=openai.DefaultHttpxClient(transport=LimitedTransport(params.timeout)),
        )

    def in_parallel(self, function: Callable[[Item], Read], items: Sequence[Item]) -> list[Read]:
        """The results of a function that calls `read`, in the order of the items.

        Raises:
            BadInput, Unreachable, RondoError: see `read`; no further item is started.
            BadInput: most questions so far have no readable answer.
        """
        pool = ThreadPoolExecutor(self.params.concurrency)
        unreadable_before = self.unreadable
        with progress(f"asking {self.params.model}", len(items), "questions") as asking:

            def counted(item: Item) -> Read:
                result = function(item)
                asking.add()
                return result

            try:
                results = list(pool.map(counted, items))
            finally:
                pool.shutdown(cancel_futures=True)
        if self.unreadable > unreadable_before:
            self._check_readable(0)
            print(self._unreadable_share(), flush=True)
        return results

    def read(self, messages: Messages, parse: Callable[[str], Read], form: str) -> Read | None:
        """The parsed answer to messages.

        If the answer cannot be read, the request is repeated with the error appended; None if that
        does not help. Then no answer is kept, and those from the cache are requested again.

        Args:
            messages: the conversation so far, which ends with a question.
            parse: reads an answer; its ValueError is sent to the model.
            form: the JSON object that an answer must contain.

        Raises:
            BadInput: the server refuses the key or the request, or does not have the model; or most
                questions so far have no readable answer.
            Unreachable: the server does not answer now; the answers so far are kept.
            RondoError: the server's answer is not a chat completion.
        """
        with self.lock:
            self.questions += 1
        for _ in range(2):
            conversation, from_cache = messages, False
            for _ in range(1 + UNREADABLE_RETRIES):
                text, is_cached = self._answer(conversation)
                from_cache = from_cache or is_cached
                try:
                    return parse(text)
                except ValueError as fault:
                    conversation = [
                        *conversation,
                        {"role": "assistant", "content": text or "(nothing)"},
                        {"role": "user", "content": AGAIN.format(fault=fault, form=form)},
                    ]
            for end in range(len(messages), len(conversation), 2):
                self.answers.remove(self._key(conversation[:end]))
            if not from_cache:
                break
        with self.lock:
            self.unreadable += 1
            answer = conversation[len(messages)]["content"].replace(self.api_key, "***")
            self.unreadable_answer, self.form = answer[:SHOWN], form
        self._check_readable(UNREADABLE_BEFORE_STOP)
        return None

    def _unreadable_share(self) -> str:
        return (
            f"{self.params_key}: {self.unreadable} of {self.questions} questions so far have no"
            f" readable answer, e.g. {self.unreadable_answer!r}"
        )

    def _check_readable(self, least: int) -> None:
        """Check that at most `least`, or at most MAX_UNREADABLE of all questions, are unreadable.

        Raises:
            BadInput: there are more.
        """
        if self.unreadable > max(least, MAX_UNREADABLE * self.questions):
            raise BadInput(
                f"{self._unreadable_share()}; expected one JSON object: {self.form}. Choose a model"
                f" that can answer so ({self.params_key}.model), or raise"
                f" {self.params_key}.max_completion_tokens if the answer was cut, and run the stage"
                " again: unreadable answers are not kept"
            )

    def cost(self) -> Metrics:
        """All answers so far, with those from the cache, so that reruns are equal."""
        counts = self.counts
        return {
            "answers": counts.calls + counts.cached,
            "tokens_in": counts.tokens_in,
            "tokens_out": counts.tokens_out,
            "cost": self._price(counts.tokens_in, counts.tokens_out),
        }

    def usage(self) -> Metrics:
        """What this process requested and paid for, and what it found in the cache."""
        counts = self.counts
        return asdict(counts) | {"paid": self._price(counts.paid_tokens_in, counts.paid_tokens_out)}

    def _price(self, tokens_in: int, tokens_out: int) -> float | None:
        """The price of so many tokens; None if params.yaml does not give the prices."""
        price_in = self.params.price_per_million_input
        price_out = self.params.price_per_million_output
        if price_in is None or price_out is None:
            return None
        return (tokens_in * price_in + tokens_out * price_out) / 1e6

    def _request(self, messages: Messages) -> dict[str, Any]:
        return {
            "model": self.params.model,
            "messages": messages,
            "temperature": 0,
            "max_completion_tokens": self.params.max_completion_tokens,
        }

    def _key(self, messages: Messages) -> str:
        """The cache's key of the answer to messages.

        It contains the server: two servers may have different models of the same name.
        """
        return json_hash({**self._request(messages), "server": self.params.base_url})

    def _answer(self, messages: Messages) -> tuple[str, bool]:
        """The answer to messages, and whether it is from the cache."""
        key = self._key(messages)
        cached = self.answers.get(key)
        answer = cached or self.answers.put(key, self._call(self._request(messages)))
        with self.lock:
            self.counts.add(answer, paid=cached is None)
        return answer.text, cached is not None

    def _call(self, request: dict[str, Any]) -> Answer:
        """Send a request to the server."""
        completions = self.client.chat.completions.with_raw_response
        try:
            content = completions.create(**request).http_response.content
        except openai.OpenAIError as error:
            self._raise_with_next_step(error)
        # not openai's own types: they are not checked
        try:
            completion = Completion.model_validate_json(content)
        except ValidationError as error:
            raise RondoError(
                f"{self.params_key}.base_url {self.params.base_url}: the server returned no chat "
                f"completion ({format_validation_errors(error)}); the address usually ends in /v1. "
                "Correct it and run the stage again"
            ) from None
        usage = completion.usage or TokenCounts()
        text = completion.choices[0].message.content or ""
        return Answer(text, usage.prompt_tokens, usage.completion_tokens)

    def _raise_with_next_step(self, error: openai.OpenAIError) -> NoReturn:
        """Raise an error that names the param to change and the next step.

        A server may quote the API key in its error, so the key is removed from the message.
        """
        params, key = self.params, self.params_key
        reason = str(error).replace(self.api_key, "***")[:SHOWN]
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            variable = params.api_key_env
            next_step = f"export one that {params.base_url} accepts"
            if self.api_key != NO_KEY:
                state = "refused"
            elif os.environ.get(variable):
                state = "not for this server"
                next_step = f'add {variable} = ["{params.base_url}"] to [tool.rondo.api_keys]'
                next_step += " in pyproject.toml"
            else:
                state = "not set"
            raise BadInput(
                f"{key}.api_key_env {variable}: the API key in this environment variable "
                f"is {state} ({reason}); {next_step} and run the stage again"
            ) from None
        if isinstance(error, openai.NotFoundError):
            raise BadInput(
                f"{key}.model {params.model}: {params.base_url} does not have it ({reason}); its "
                f"models are listed at {params.base_url}/models; it may also be that "
                f"{key}.base_url lacks its /v1"
            ) from None
        if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
            raise BadInput(
                f"{key}.model {params.model}: {params.base_url} rejects the request ({reason}); it "
                "may be too long for this model, or the model may not support temperature 0; "
                "choose another model"
            ) from None
        temporary = isinstance(
            error, openai.APIConnectionError | openai.RateLimitError | openai.InternalServerError
        )
        raise (Unreachable if temporary else RondoError)(
            f"{key}.base_url {params.base_url}: no answer after up to {params.max_retries} retries "
            f"({reason}); start the server, or, if it is slow or overloaded, raise {key}.timeout "
            f"or lower {key}.concurrency, and run the stage again: the answers so far are kept"
        ) from None
