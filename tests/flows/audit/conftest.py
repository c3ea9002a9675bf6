"""Fixtures of other folders: a tiny reward model, its server, and a stand-in of a chat server."""

from tests.flows.serving.conftest import models, params, queues, scorer, serve  # noqa: F401
from tests.stages.conftest import chat_server  # noqa: F401
