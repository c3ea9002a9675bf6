"""Addresses of the local services, and a check whether they respond."""

import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable

from flows.core.prefect_api import HOST

LogLine = Callable[[str], None]

MLFLOW_PORT = int(os.environ.get("MLFLOW_PORT", "5000"))
MLFLOW_URL = f"http://{HOST}:{MLFLOW_PORT}"
# Without this parameter MLflow opens its pages for agents instead of those for models.
WORKFLOW = "workflowType=machine_learning"
MLFLOW_PAGES = f"{MLFLOW_URL}/#/experiments?{WORKFLOW}"


def without_credentials(text: str) -> str:
    """The text with no user and password in its URLs."""
    return re.sub("//[^/@ ]*@", "//", text)


def is_up(url: str) -> bool:
    """Whether a GET of `url` returns status 200 within 2 seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False
