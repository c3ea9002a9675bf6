"""Jobs of a Ray cluster: submitted once, found again, refused with the next step."""

from pathlib import Path
from uuid import uuid4

import pytest

from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.ray import cluster as cluster_module
from stages.lib.core.ray import job as job_module
from stages.lib.core.ray.cluster import RayCluster
from stages.lib.core.ray.job import RayJob
from tests.servers import NOWHERE


@pytest.fixture(autouse=True)
def fast(monkeypatch) -> None:
    monkeypatch.setattr(job_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(http_session, "BACKOFF_SECONDS", 0.0)


def job(address: str, folder: Path) -> RayJob:
    return RayJob(RayCluster(address), folder / "job.json", "ppo@r0")


def unexpected() -> str:
    raise AssertionError("no further job is needed")


@pytest.mark.parametrize("command", ["sleep 60", "true"])
def test_a_job_that_runs_or_has_succeeded_is_found_again(ray, tmp_path, command):
    first = job(ray.address, tmp_path)
    first.start(lambda: command)
    if command == "true":
        assert first.follow(lambda: False).status == "SUCCEEDED"
    again = job(ray.address, tmp_path)
    again.start(unexpected)
    assert again.ids == first.ids
    again.stop()


def test_the_next_job_follows_one_that_failed_and_one_that_was_stopped(ray, tmp_path):
    """`follow` stops a job when it is told to: the second one, which would sleep."""
    ends = {"exit 3": "FAILED", "sleep 60": "STOPPED", "true": "SUCCEEDED"}
    for number, (command, status) in enumerate(ends.items(), 1):
        tried = job(ray.address, tmp_path)
        tried.start(lambda command=command: command)
        assert len(set(tried.ids)) == number
        assert tried.follow(lambda command=command: command == "sleep 60").status == status


def test_a_job_that_is_to_be_ended_has_ended_before_the_next_one(ray, tmp_path):
    first = job(ray.address, tmp_path)
    first.end_last()  # there is none
    first.start(lambda: "sleep 60")
    again = job(ray.address, tmp_path)
    again.end_last()
    ended = again.cluster.job(first.id)
    assert ended and ended.status == "STOPPED"
    again.submit(lambda: "true")
    assert again.ids == [first.id, again.id]
    assert again.follow(lambda: False).status == "SUCCEEDED"


def test_a_job_on_a_node_that_had_died_is_submitted_again(ray, tmp_path, monkeypatch, capsys):
    if not hasattr(ray, "lost"):
        pytest.skip("on a real cluster, tests/stages/ppo/test_ray.py kills the node")
    monkeypatch.setattr(job_module, "AGAIN_SECONDS", 0.0)
    marks = tmp_path / "marks"
    ray.lost = 2
    tried = job(ray.address, tmp_path)
    tried.submit(lambda: f"echo ran >> {marks}")
    assert tried.follow(lambda: False).status == "SUCCEEDED"
    assert (marks.read_text(), len(tried.ids)) == ("ran\n", 3)
    assert capsys.readouterr().out.count("submits it again") == 2
    ray.lost = 1
    (tmp_path / "attached").mkdir()
    first = job(ray.address, tmp_path / "attached")
    first.submit(lambda: f"echo ran >> {marks}")
    again = job(ray.address, tmp_path / "attached")  # the stage was killed meanwhile
    again.start(lambda: f"echo ran >> {marks}")
    assert again.ids == first.ids
    assert again.follow(lambda: False).status == "SUCCEEDED"
    assert marks.read_text() == "ran\nran\n"
    marks.write_text("ran\n")
    ray.lost = 100
    tried = job(ray.address, tmp_path)
    tried.submit(lambda: f"echo ran >> {marks}")
    assert tried.follow(lambda: False).status == "FAILED"  # after the last try
    assert (marks.read_text(), len(tried.ids)) == ("ran\n", 3 + job_module.TRIES)


def test_what_looks_at_the_job_is_called_once_more_after_its_end(ray, tmp_path):
    started, seen = job(ray.address, tmp_path), []
    mark = tmp_path / "mark"
    started.start(lambda: f"sleep 0.3; touch {mark}")
    started.follow(lambda: bool(seen.append(mark.exists())))
    assert seen[-1]
    assert not seen[0]


def test_the_same_run_in_another_folder_has_a_job_of_its_own(ray, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        job(ray.address, tmp_path / name).start(lambda: "true")
    one, two = (job(ray.address, tmp_path / name) for name in ("one", "two"))
    assert one.id != two.id


def test_a_kill_before_the_submission_leaves_no_job_behind(ray, tmp_path):
    def killed() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(ray.address, tmp_path).start(killed)
    again = job(ray.address, tmp_path)
    again.start(lambda: "true")
    assert len(again.ids) == 2
    assert again.follow(lambda: False).status == "SUCCEEDED"


def test_a_submission_whose_reply_was_lost_is_not_refused(ray, tmp_path):
    cluster, job_id = RayCluster(ray.address), uuid4().hex
    cluster.submit(job_id, "sleep 60")
    cluster.submit(job_id, "exit 3")  # refused, as it is known: the first one goes on
    known = cluster.job(job_id)
    assert known and not known.ended
    cluster.stop(job_id)


def test_another_cluster_than_that_of_the_job_is_refused(ray, tmp_path):
    job(ray.address, tmp_path).start(lambda: "true")
    record = tmp_path / "job.json"
    record.write_text(record.read_text().replace(ray.address, "http://other:8265"))
    with pytest.raises(BadInput, match=r"job .* is on the Ray cluster at http://other:8265, but"):
        job(ray.address, tmp_path)


def test_a_cluster_that_does_not_answer_is_named():
    with pytest.raises(Unreachable, match=rf"launcher\.ray_address {NOWHERE}: no Ray dashboard"):
        RayCluster(NOWHERE)


class TestStandInAlone:
    """What a real cluster cannot be made to do here."""

    @pytest.fixture(autouse=True)
    def alone(self, ray) -> None:
        if not hasattr(ray, "jobs"):
            pytest.skip("a real cluster")

    def test_a_head_that_was_started_anew_does_not_know_the_job(self, ray, tmp_path):
        started = job(ray.address, tmp_path)
        started.start(lambda: "sleep 60")
        lost = ray.jobs.pop(started.id)
        with pytest.raises(RondoError, match=r"does not know the job .* any more"):
            started.follow(lambda: False)
        lost.kill()
        again = job(ray.address, tmp_path)
        again.start(lambda: "true")
        assert again.id != started.id

    def test_a_refused_job_has_the_words_of_the_cluster(self, ray, tmp_path):
        ray.refuses = "ValueError: no such runtime environment"
        with pytest.raises(BadInput, match=r"refuses the job .*: ValueError: no such runtime"):
            job(ray.address, tmp_path).start(lambda: "true")

    def test_a_head_that_was_just_started_is_waited_for(self, ray, tmp_path, monkeypatch):
        monkeypatch.setattr(cluster_module, "START_SECONDS", 0.0)
        ray.refuses = "No available agent to submit job, please try again later."
        started = job(ray.address, tmp_path)
        started.start(lambda: "true")
        assert started.follow(lambda: False).status == "SUCCEEDED"

    def test_a_cluster_with_a_token(self, ray, tmp_path, monkeypatch):
        ray.token = "secret"
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadInput, match=r"Ray wants a token: set RAY_AUTH_TOKEN, and list it"):
            RayCluster(ray.address)
        Path("pyproject.toml").write_text(
            f'[tool.rondo.api_keys]\nRAY_AUTH_TOKEN = ["{ray.address}"]\n'
        )
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        assert RayCluster(ray.address).version == "2.55.0"
