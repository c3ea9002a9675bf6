"""Load test of `rondo serve-reward`: texts per second, latencies, and clients that misbehave.

`python docs/bench/reward_service.py ROUND [SECONDS, default 20]`, in the folder of a project with a
finished round. Sends texts of the round's evaluation, one per request as OpenRLHF does, by more and
more clients at once; then again while other clients send a body slowly, a body that is not JSON, or
one that is too large. The server runs with its own defaults on the same machine.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from flows.serving.app import MAX_BODY_BYTES
from stages.lib.core.files import read_jsonl, stage_dir

CLIENTS = (1, 4, 16, 64)
SLOW, BROKEN = 64, 4  # clients that misbehave, of each kind


@dataclass
class Load:
    """What clients saw. latencies: seconds of answers with status 200."""

    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def row(self, seconds: float) -> str:
        p50, p99 = np.percentile(self.latencies or [0.0], [50, 99])
        return (
            f"{len(self.latencies) / seconds:8.1f}  {p50:6.3f}  {p99:6.3f}  {dict(self.statuses)}"
        )


async def ask(client: httpx.AsyncClient, texts: list[tuple[str, str]], load: Load) -> None:
    """Send requests until cancelled."""
    while True:
        prompt, response = random.choice(texts)
        start = time.monotonic()
        reply = await client.post(
            "/get_reward", json={"query": [prompt + response], "prompts": [prompt]}
        )
        load.statuses[reply.status_code] += 1
        if reply.status_code == 200:
            load.latencies.append(time.monotonic() - start)


async def send(client: httpx.AsyncClient, content: bytes, load: Load) -> None:
    """Send a bad body again and again until cancelled."""
    while True:
        reply = await client.post("/get_reward", content=content)
        load.statuses[reply.status_code] += 1


async def send_slowly(url: str, load: Load) -> None:
    """Send a byte per second until the server answers, then anew."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /get_reward HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n"
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(1)
        load.statuses[int(answer.result().split()[1])] += 1
        writer.close()


async def run_for(seconds: float, jobs: list[asyncio.Task[None]]) -> None:
    """Run jobs that never end; raises what one raises."""
    done, _ = await asyncio.wait(jobs, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    for job in done:
        job.result()


async def measure(url: str, texts: list[tuple[str, str]], seconds: float) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        print("clients  texts/s     p50     p99  statuses")
        for clients in CLIENTS:
            load = Load()
            start = asyncio.create_task
            await run_for(seconds, [start(ask(client, texts, load)) for _ in range(clients)])
            print(f"{clients:7}  {load.row(seconds)}")
        good, slow, broken, large = Load(), Load(), Load(), Load()
        jobs = [start(ask(client, texts, good)) for _ in range(16)]
        jobs += [start(send_slowly(url, slow)) for _ in range(SLOW)]
        jobs += [start(send(client, b"{", broken)) for _ in range(BROKEN)]
        jobs += [start(send(client, b" " * (MAX_BODY_BYTES + 1), large)) for _ in range(BROKEN)]
        seconds = max(seconds, 40)  # longer than the server waits for a body
        await run_for(seconds, jobs)
        print(f"     16  {good.row(seconds)}, beside clients that misbehave:")
        print(
            f"{SLOW} slow {dict(slow.statuses)}, {BROKEN} not JSON {dict(broken.statuses)}, ",
            end="",
        )
        print(f"{BROKEN} too large {dict(large.statuses)}")


def compare(url: str, texts: list[tuple[str, str]], recorded: list[float]) -> None:
    """Print how far the service's scores are from those of the stage `evaluate`, which scores the
    sampled tokens.
    """
    query, prompts = [prompt + text for prompt, text in texts], [prompt for prompt, _ in texts]
    for name, body in (("with prompts", {"prompts": prompts}), ("without", {})):
        reply = httpx.post(f"{url}/get_reward", json={"query": query, **body}, timeout=600).json()
        differences = np.abs(np.array(reply["rewards"]) - recorded)
        print(
            f"scores {name}: {len(texts)} texts, {np.mean(differences > 0.01):.1%} differ by more "
            f"than 0.01 from the stage's, at most by {differences.max():.3f}"
        )


def main(round_: str, seconds: float) -> None:
    path = stage_dir(round_, "evaluate") / "samples.jsonl"
    rows = read_jsonl(path)
    texts = [(row["prompt"], row["ppo"]) for row in rows]
    recorded = [row["ppo_score"] for row in rows]
    if not all(isinstance(prompt, str) for prompt, _ in texts):
        raise SystemExit("prompts with messages: expected a task whose prompts are texts")
    command = [sys.executable, "-m", "flows.cli", "serve-reward", round_, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        print(line, end="")
        if "http" not in line:
            raise SystemExit("the server did not start: see its error above")
        url = line.partition("http://")[2].partition("/")[0]
        compare(f"http://{url}", texts, recorded)
        asyncio.run(measure(f"http://{url}", texts, seconds))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 20)
