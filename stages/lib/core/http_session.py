"""HTTP requests that are tried again."""

from collections.abc import Collection

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from stages.lib.core.project_limits import read_api_key

TRIES, BACKOFF_SECONDS = 5, 1.0
RETRIED = (429, 500, 502, 503, 504)


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
