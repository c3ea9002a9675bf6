"""Addresses of the local services, and whether they are up."""

import os
import urllib.error
import urllib.request
from collections.abc import Callable

from flows.core.prefect_api import HOST

LogLine = Callable[[str], None]

MLFLOW_PORT = int(os.environ.get("MLFLOW_PORT", "5000"))
MLFLOW_URL = f"http://{HOST}:{MLFLOW_PORT}"
WORKFLOW = (
    "workflowType=machine_learning"  # MLflow's pages for models; else it opens those for agents
)
MLFLOW_PAGES = f"{MLFLOW_URL}/#/experiments?{WORKFLOW}"


def is_up(url: str) -> bool:
    """Whether a GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
