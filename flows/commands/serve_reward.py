"""`rondo serve-reward`: a round's reward model over HTTP (docs/serving.md)."""

import argparse


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = (
        "serve a round's reward model over HTTP until Ctrl-C, as OpenRLHF's /get_reward and vLLM's "
        "/classify"
    )
    service = commands.add_parser(
        "serve-reward",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="Environment variable: RONDO_REWARD_TOKEN, a token that requests then have to send.",
    )
    service.add_argument("round", metavar="ROUND", help="the round, e.g. r0")
    service.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this machine to listen on; default: 127.0.0.1",
    )
    service.add_argument("--port", type=int, default=8100, help="default: 8100; 0: any free port")
    service.add_argument(
        "--allow-failed",
        action="store_true",
        help="also serve a model that its gate has not passed",
    )


def run(options: argparse.Namespace) -> int:
    from flows.serving.server import serve  # imports torch

    serve(options.round, options.host, options.port, options.allow_failed)
    return 0
