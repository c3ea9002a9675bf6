"""The server: checks the model, loads it, and answers requests until a signal."""

import ipaddress
import os

from flows.core.services import listen
from flows.serving.accepted_model import find_model
from flows.serving.app import make_app
from flows.serving.scoring_queue import ScoringQueue
from flows.serving.texts import Texts
from stages.lib.core.ended_rounds import params_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, stage_dir
from stages.lib.core.params import Params
from stages.lib.lm.end_tokens import saved_end_tokens
from stages.lib.lm.loading import default_device, load_config, load_tokenizer, setup_torch
from stages.lib.lm.scoring import RewardScorer
from stages.lib.lm.world import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS
from stages.ppo.common.rewards import TOKEN

WAITING_BATCHES = 8  # before requests are refused with 503
LENGTHS = 4  # a text may have this many times reward.max_length tokens: the model has seen no more
CONNECTIONS = 256  # at once; further ones get 503


def serve(round_: str, host: str, port: int, allow_failed: bool) -> None:
    """Serve until a signal.

    Raises:
        BadInput, GateFailed: see `find_model`; the round is unknown; the port is taken; or `host`
            is another than this machine's own address, and there is no token.
    """
    import uvicorn

    params = params_of(round_)
    token = os.environ.get(TOKEN) or None
    if not token and not is_loopback(host):
        raise BadInput(
            f"--host {host}: other machines may connect, so requests need a token: set {TOKEN}"
        )
    model = find_model(params, round_, allow_failed)
    listener = listen(host, port)
    setup_torch(params)
    folder = stage_dir(round_, "reward") / "model"
    scorer = RewardScorer(folder, params)
    texts = load_texts(scorer, params)
    batch_tokens = CPU_BATCH_TOKENS if default_device().type == "cpu" else GPU_BATCH_TOKENS
    queue = ScoringQueue(scorer.tokens, batch_tokens, WAITING_BATCHES * batch_tokens)
    config = uvicorn.Config(
        make_app(model, texts, queue, token),
        access_log=False,
        log_level="warning",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=30,
    )
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"{model.name}, gate {model.gate}: {address}/get_reward, /classify, /health")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:  # uvicorn raises the signal again after it has answered the last requests
        queue.close()


def load_texts(scorer: RewardScorer, params: Params) -> Texts:
    """How texts become tokens of the project's base model.

    Raises:
        BadInput: the reward model has other tokens.
    """
    base = ASSETS / "model"
    tokenizer = load_tokenizer(base)
    if not scorer.reads(tokenizer):
        raise BadInput(
            "the reward model's tokens are not those of assets.model, whose template requests "
            "have: serve reward.model itself, e.g. with vLLM"
        )
    config = load_config(base).get_text_config()
    end_texts = tokenizer.convert_ids_to_tokens(saved_end_tokens(base, tokenizer).ids)
    max_tokens = min(LENGTHS * params.reward.max_length, config.max_position_embeddings)
    return Texts(tokenizer, tuple(end_texts), max_tokens)


def is_loopback(host: str) -> bool:
    """
    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "node-1")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
