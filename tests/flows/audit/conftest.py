"""Fixtures of other folders: tiny models, a reward model's server, a stand-in of a chat server."""

from tests.flows.serving.conftest import models, params, queues, scorer, serve  # noqa: F401
from tests.stages.conftest import chat_server, tiny_folder  # noqa: F401
