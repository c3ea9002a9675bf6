"""Jobs of a Ray cluster, by the REST API of its dashboard: Ray itself is not needed here.

The API is that of `ray job submit`: https://docs.ray.io/en/latest/cluster/running-applications/
job-submission/rest.html
"""

import time
from typing import Any, NamedTuple

import requests

from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, Unreachable

TOKEN = "RAY_AUTH_TOKEN"  # Ray's own environment variable
TIMEOUT_SECONDS = 30.0
# Ray's words while a head that was just started waits for its agent, which takes seconds
NOT_YET, START_TRIES, START_SECONDS = "try again later", 15, 2.0
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class Job(NamedTuple):
    """status: PENDING, RUNNING, or one of ENDED. message: why, in Ray's words."""

    status: str
    message: str

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class RayCluster:
    """The cluster whose dashboard is at an address.

    Raises:
        Unreachable: no dashboard answers there.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        # not after 500, Ray's reply to a job that it refuses
        self.session = http_session.retrying_session(address, TOKEN, (429, 502, 503, 504))
        self.version = str(self._request("GET", "api/version").json().get("ray_version"))

    def submit(self, job_id: str, command: str) -> None:
        """Start a shell command on the cluster's head node.

        Raises:
            BadInput: the cluster refuses the job.
        """
        body, tries = {"submission_id": job_id, "entrypoint": command}, 0
        while not (response := self._request("POST", "api/jobs/", json=body)).ok:
            # a request whose reply was lost, and which was sent again, is refused the second time
            if self.job(job_id) is not None:
                return
            reason = " ".join(response.text.strip().splitlines()[-1:])[:300]
            tries += 1
            if NOT_YET not in reason or tries == START_TRIES:
                raise BadInput(f"{self.address} refuses the job {job_id}: {reason}")
            time.sleep(START_SECONDS)

    def job(self, job_id: str) -> Job | None:
        """A job; None if the cluster does not know it, e.g. because its head has ended since."""
        response = self._request("GET", f"api/jobs/{job_id}")
        if response.status_code == requests.codes.not_found:
            return None
        details = response.json()
        return Job(details["status"], str(details.get("message") or ""))

    def stop(self, job_id: str) -> None:
        """Stop a job, with all its processes; one that has ended stays as it is."""
        self._request("POST", f"api/jobs/{job_id}/stop")

    def _request(self, method: str, path: str, **more: Any) -> requests.Response:
        url = f"{self.address}/{path}"
        try:
            response = self.session.request(method, url, timeout=TIMEOUT_SECONDS, **more)
        except requests.RequestException as error:
            raise Unreachable(
                f"launcher.ray_address {self.address}: no Ray dashboard answers there: {error!r}. "
                "Next: `ray start --head` on the cluster, or set the address of its dashboard"
            ) from error
        if response.status_code in (requests.codes.unauthorized, requests.codes.forbidden):
            raise BadInput(
                f"{self.address}: Ray wants a token: set {TOKEN}, and list it with this address in "
                "pyproject.toml [tool.rondo.api_keys]"
            )
        return response
