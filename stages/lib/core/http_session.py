"""HTTP requests that are tried again, and replies of limited size."""

import time
from collections.abc import Collection, Iterable, Iterator

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from stages.lib.core.project_limits import read_api_key

TRIES, BACKOFF_SECONDS = 5, 1.0
RETRIED = (429, 500, 502, 503, 504)
MAX_REPLY_BYTES, CHUNK_BYTES = 64 << 20, 1 << 16


def retrying_session(
    url: str, token_variable: str, retried: Collection[int] = RETRIED
) -> requests.Session:
    """A session that sends a request up to TRIES times, and waits twice as long each time.

    Args:
        url: the server.
        token_variable: environment variable with a token for the server, which is sent if
            [tool.rondo.api_keys] in pyproject.toml lists both.
        retried: the HTTP statuses after which a request is sent again.
    """
    session = requests.Session()
    if token := read_api_key(token_variable, url):
        session.headers["Authorization"] = f"Bearer {token}"
    retry = Retry(
        total=TRIES - 1,
        backoff_factor=BACKOFF_SECONDS,
        allowed_methods=["GET", "POST"],
        status_forcelist=retried,
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


class EndlessReply(requests.RequestException):
    """A reply has too many bytes, or does not end in time."""


def read_body(response: requests.Response, seconds: float) -> bytes:
    """The body of a reply to a request with `stream=True`.

    Raises:
        EndlessReply: it has more than MAX_REPLY_BYTES, or does not end within the seconds: the
            timeout of `requests` is for each piece.
        requests.RequestException: the connection breaks.
    """
    with response:
        return b"".join(limited_chunks(response.iter_content(CHUNK_BYTES), seconds))


def limited_chunks(chunks: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    """The chunks of a body.

    Raises:
        EndlessReply: see `read_body`.
    """
    size, end = 0, time.monotonic() + seconds
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            raise EndlessReply(f"the reply has more than {MAX_REPLY_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise EndlessReply(f"the reply did not end within {seconds:g} s")
        yield chunk
