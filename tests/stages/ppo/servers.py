"""A reward server on this machine whose replies a test can spoil."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Spoil = Callable[[dict], dict | int]  # a good reply to the reply that is sent, or to a status


class LengthServer(ThreadingHTTPServer):
    """OpenRLHF's protocol; the reward is the length of a query.

    Attributes:
        spoil: what becomes of a good reply.
        requests: the bodies so far.
        model: what replies state as their model.
        received: a request has come.
        answering: replies wait until it is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spoil: Spoil = lambda reply: reply
        self.requests: list[dict] = []
        self.model, self.answering = "length-1", threading.Event()
        self.answering.set()
        self.received = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/get_reward"


class Handler(BaseHTTPRequestHandler):
    server: LengthServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.received.set()
        self.server.answering.wait()
        reply = self.server.spoil(
            {
                "rewards": [len(text) for text in body["query"]],
                "ids": body["ids"],
                "model": self.server.model,
            }
        )
        status = reply if isinstance(reply, int) else 200
        content = b"" if isinstance(reply, int) else json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client has given up
            pass

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def length_server() -> Iterator[LengthServer]:
    server = LengthServer()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.answering.set()
    server.shutdown()
    server.server_close()
