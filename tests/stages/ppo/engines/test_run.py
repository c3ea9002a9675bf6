"""The policy stage with an engine: from the job to the outputs of PPO."""

import signal
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from flows.execution import fork_server
from stages.lib.core.errors import BadInput, Diverged, RondoError
from stages.lib.core.files import read_json, read_jsonl, work_dir, write_json
from stages.lib.core.ray.cluster import Job, RayCluster
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.saving import saved_weights_hash
from stages.ppo.__main__ import main as ppo
from tests.servers import until
from tests.stages.ppo import stage_process

FOLDER = Path("rounds/r0/ppo")
SCALARS = {
    *("policy_loss", "entropy", "policy_grad_norm", "learning_rate", "score_mean", "score_std"),
    *("response_length", "clip_fraction", "kl_per_token", "eos_rate"),
}
EVENT = "logger.wandb.group"


def engine_folders() -> set[Path]:
    return set(work_dir("r0", "ppo").glob("*/engine"))


def engine_folder() -> Path:
    [folder] = engine_folders()
    return folder


def jobs(folder: Path) -> list[str]:
    """The states of the jobs of a run, in their order, once no job is being stopped."""
    recorded = read_json(folder / "job.json", "")
    cluster = RayCluster(recorded["address"])

    def states() -> list[Job | None]:
        return [cluster.job(job_id) for job_id in recorded["jobs"]]

    until(lambda: all(job and job.ended for job in states()), 30)
    return [job.status for job in states() if job]


def test_the_stage_has_the_outputs_of_ppo(make_params, ray, capsys):
    """The first policy is SFT still, e.g. in a warm-up, which is no error: the later ones count."""
    ppo(make_params(ray.address, {EVENT: "STILL=2"}), "r0")
    steps = read_jsonl(FOLDER / "metrics.jsonl", "")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 2, 4, 5]
    assert all(set(row) - {"step"} == SCALARS for row in steps[:5])
    assert [row["kl_per_token"] for row in steps[:5]] == pytest.approx(
        [0.0, 0.01, 0.02, 0.03, 0.04], abs=1e-6
    )
    metrics, manifest = (
        read_json(FOLDER / "metrics.json", ""),
        read_json(FOLDER / "manifest.json", ""),
    )
    assert (metrics["updates"], metrics["stopped"]) == (5, "completed")
    assert [row["update"] for row in metrics["validations"]][:4] == [0, 2, 4, 5]
    kls = [row["kl"] for row in metrics["validations"][:4]]
    assert [row["validation_kl"] for row in steps[5:]] == kls[1:]
    # each policy is the one that the engine saved: another KL than the one before
    assert kls[0] == kls[1] == 0.0 < kls[2] < kls[3]
    assert (manifest["algorithm"], manifest["engine"]) == ("ppo", "openrlhf 0.11.2")
    assert manifest["engine_failed_episodes"] == 0
    folder = engine_folder()
    saved = {2: "states/global_step2_hf", 4: "states/global_step4_hf", 5: "final"}
    assert manifest["engine_policies"] == {
        str(update): saved_weights_hash(folder / path) for update, path in saved.items()
    }
    for update, path in saved.items():
        checkpoint = load_file(FOLDER / f"checkpoints/step_{update:05d}/model.safetensors")
        weights = load_file(folder / path / "model.safetensors")
        assert all(checkpoint[name].equal(weight) for name, weight in weights.items())
    assert {row["update"] for row in list(read_rollouts(FOLDER / "rollouts"))} == {0, 5}
    assert load_tokenizer(FOLDER / "policy").vocab_size
    assert jobs(folder) == ["SUCCEEDED"]
    output = capsys.readouterr().out
    assert "submitted the job rondo-ppo-r0-" in output
    assert "openrlhf: kept the policy after update" in output


def test_options_that_the_engine_refuses_end_the_job_before_it_trains(make_params, ray):
    params = make_params(ray.address, {"ds.zero_stage": "two"})
    words = r"refuses its options: argument --ds\.zero_stage: invalid int value: 'two'\nNext: mend"
    with pytest.raises(BadInput, match=words):
        ppo(params, "r0")
    assert jobs(engine_folder()) == ["FAILED"]
    assert not list(engine_folder().glob("tensorboard/*"))


def test_a_failed_job_goes_on_from_its_checkpoint_with_as_many_gpus(make_params, ray):
    """A checkpoint is for as many processes as have saved it: with fewer, a run starts anew."""
    params = make_params(ray.address, {EVENT: "FAIL=4"})
    with pytest.raises(RondoError) as failure:
        ppo(params, "r0")
    assert "of OpenRLHF ended as FAILED" in str(failure.value)
    assert "CUDA error: out of memory" in str(failure.value)
    assert not (FOLDER / "metrics.json").exists()
    folder = engine_folder()
    params.launcher.gpus_per_node = 1
    with pytest.raises(RondoError, match="out of memory"):
        ppo(params, "r0")
    [other] = engine_folders() - {folder}
    assert "Loading the checkpoint" not in (other / "engine.log").read_text()

    params.launcher.gpus_per_node = 2
    ppo(params, "r0")
    assert jobs(folder) == ["FAILED", "SUCCEEDED"]
    steps = read_jsonl(FOLDER / "metrics.jsonl", "")
    # update 3 was made twice, since the last checkpoint was of update 2
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 2, 4, 5]
    start = folder.resolve() / "states/_actor/global_step2"
    assert (folder / "engine.log").read_text().count(f"Loading the checkpoint: {start}") == 1


def test_a_job_of_a_single_update_has_its_metrics(make_params, ray):
    """No update before it tells whether it is complete: the end of the job does."""
    params = make_params(ray.address)
    params.ppo.total_episodes = params.ppo.batch_size
    ppo(params, "r0")
    steps = read_jsonl(FOLDER / "metrics.jsonl", "")
    assert [row["step"] for row in steps] == [1, 1]  # of the update, and of its validation
    assert set(steps[0]) - {"step"} == SCALARS
    assert read_json(FOLDER / "metrics.json", "")["updates"] == 1


def test_a_job_without_metrics_is_no_success(make_params, ray):
    with pytest.raises(
        RondoError, match=r"left no metrics in .*tensorboard/rondo: can the cluster write"
    ):
        ppo(make_params(ray.address, {EVENT: "LOST=0"}), "r0")


def test_a_loss_that_is_not_finite_stops_the_job(make_params, ray):
    params = make_params(ray.address, {EVENT: "NAN=3"}, total_episodes=400)
    with pytest.raises(Diverged, match=r"openrlhf, update 3: policy_loss not finite.*Next: lower"):
        ppo(params, "r0")
    assert jobs(engine_folder()) == ["STOPPED"]


def test_a_danger_stops_the_job_and_the_saved_policies_are_validated(make_params, ray):
    """The KL of the metrics, 0.01 per update, is above the budget from update 2 on."""
    params = make_params(
        ray.address,
        {EVENT: "SLOW=8"},
        total_episodes=400,
        kl_patience=3,
        max_kl_per_token=0.0095,
        target_kl_per_token=0.009,
    )
    ppo(params, "r0")
    metrics = read_json(FOLDER / "metrics.json", "")
    assert jobs(engine_folder()) == ["STOPPED"]
    assert metrics["stopped"] == "kl above budget"
    # a checkpoint is complete if the metrics of the next update are there
    last = sum("score_mean" in row for row in read_jsonl(FOLDER / "metrics.jsonl", ""))
    assert last >= 4
    assert {row["update"] for row in metrics["validations"]} == {0, *range(2, last, 2)}


def test_a_stage_that_is_killed_attaches_to_its_job_and_one_that_is_ended_stops_it(
    make_params, ray
):
    params = make_params(ray.address, {EVENT: "SLOW=3"})
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    process = stage_process.start(fork_server.python())
    stage_process.wait_for_updates(process, 2)
    process.kill()
    process.communicate()
    stage_process.delete_outputs()
    process = stage_process.start(fork_server.python())
    stage_process.wait_for_updates(process, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "attaches to the job rondo-ppo-r0-" in output
    assert "RUNNING" in output
    assert "stops the job rondo-ppo-r0-" in output
    assert jobs(engine_folder()) == ["STOPPED"]


def test_another_model_from_the_engine_is_refused(make_params, ray):
    """The SFT model itself, other weights, and another tokenizer. The job is not run again."""
    params = make_params(ray.address, total_episodes=8, learning_rate=1e-12)
    with pytest.raises(BadInput, match="the engine's policy is the SFT model still"):
        ppo(params, "r0")
    final = engine_folder() / "final"
    config = AutoConfig.from_pretrained(final)
    config.vocab_size += 8
    AutoModelForCausalLM.from_config(config).save_pretrained(final)
    with pytest.raises(BadInput, match="other weights than those of rounds/r0/sft/model"):
        ppo(params, "r0")
    tokenizer = read_json(final / "tokenizer.json", "")
    vocabulary = tokenizer["model"]["vocab"]
    reverse = {token: len(vocabulary) - 1 - number for token, number in vocabulary.items()}
    tokenizer["model"]["vocab"] = reverse
    write_json(final / "tokenizer.json", tokenizer)
    with pytest.raises(BadInput, match=r"its tokenizer reads the prompt .* otherwise"):
        ppo(params, "r0")
    assert jobs(engine_folder()) == ["SUCCEEDED"]
    assert not (FOLDER / "metrics.json").exists()


def test_an_ensemble_is_refused_before_a_job(make_params, ray):
    params = make_params(ray.address)
    Path("rounds/r0/reward/model/members/1").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"set reward\.ensemble to 1"):
        ppo(params, "r0")
    assert not list(work_dir("r0", "ppo").glob("*/engine/job.json"))
