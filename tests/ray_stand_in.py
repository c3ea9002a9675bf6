"""Stands in for the dashboard of a Ray cluster: the part of its REST API that Rondo uses, with
Ray 2.55's replies. A job is a process of this machine.

`make test-engines` runs the same tests on a real cluster.
"""

import json
import os
import signal
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class RayStandIn(ThreadingHTTPServer):
    """
    Attributes:
        jobs: process by submission id. A head that was started anew knows none.
        environment: of the jobs.
        lost: how many of the next jobs are placed on a node that has died.
        refuses: the last line of its answer to a submission, with 500, once; "": none.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()
        self.environment, self.refuses, self.token = environment, "", ""
        self.lost = 0
        self.never_ran: set[str] = set()
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def submit(self, job_id: str, entrypoint: str) -> None:
        if self.lost:
            self.lost -= 1
            self.never_ran.add(job_id)
            entrypoint = "sleep 0.5; exit 1"  # Ray says so after a while
        self.jobs[job_id] = subprocess.Popen(
            entrypoint, shell=True, env=os.environ | self.environment, start_new_session=True
        )

    def status(self, job_id: str) -> str:
        code = self.jobs[job_id].poll()
        if job_id in self.stopped:
            return "STOPPED"
        return {None: "RUNNING", 0: "SUCCEEDED"}.get(code, "FAILED")

    def stop(self, job_id: str) -> None:
        if self.jobs[job_id].poll() is None:
            self.stopped.add(job_id)
            os.killpg(self.jobs[job_id].pid, signal.SIGKILL)
            self.jobs[job_id].wait()

    def close(self) -> None:
        for job_id in self.jobs:
            self.stop(job_id)
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: RayStandIn

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: Any) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self.reply(401, "Unauthorized: Missing authentication token")
        job_id = self.path.rpartition("/")[2]
        if self.path == "/api/version":
            self.reply(200, {"version": "4", "ray_version": "2.55.0"})
        elif job_id not in self.server.jobs:
            self.reply(404, f"Job {job_id} does not exist")
        else:
            status = self.server.status(job_id)
            message = f"Job is {status}."
            if status == "FAILED" and job_id in self.server.never_ran:
                message = (
                    "The actor died because its node has died. The actor never ran - it was "
                    "cancelled before it started running."
                )
            self.reply(200, {"status": status, "message": message})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/stop"):
            self.server.stop(self.path.split("/")[-2])
            return self.reply(200, {"stopped": True})
        job = json.loads(body)
        known, refusal = job["submission_id"] in self.server.jobs, self.server.refuses
        self.server.refuses = ""
        if known or refusal:
            return self.reply(500, f"Traceback ...\n{refusal or 'ValueError: Job already exists.'}")
        self.server.submit(job["submission_id"], job["entrypoint"])
        self.reply(200, {"job_id": None, "submission_id": job["submission_id"]})
