"""`rondo serve-reward`: a round's reward model over HTTP (docs/serving.md)."""

import argparse

from flows.core.services import HOST

ABOUT = (
    "serve a round's reward model over HTTP until Ctrl-C, as OpenRLHF's /get_reward and vLLM's "
    "/classify"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Environment variable: RONDO_REWARD_TOKEN, a token that requests then have to send."
    )
    parser.add_argument("round", metavar="ROUND", help="the round, e.g. r0")
    parser.add_argument(
        "--host", default=HOST, help=f"address of this machine to listen on; default: {HOST}"
    )
    parser.add_argument("--port", type=int, default=8100, help="default: 8100; 0: any free port")
    parser.add_argument(
        "--allow-failed",
        action="store_true",
        help="also serve a model that its gate has not passed",
    )


def run(options: argparse.Namespace) -> int:
    from flows.serving.server import serve  # imports torch

    serve(options.round, options.host, options.port, options.allow_failed)
    return 0
