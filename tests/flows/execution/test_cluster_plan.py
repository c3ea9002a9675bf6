"""Memory and time of PPO on a cluster, by hand and against published runs."""

from dataclasses import replace

import pytest

from flows.execution.cluster_plan import (
    Cluster,
    Workload,
    hours,
    make_plan,
    parse_cluster,
    smallest_that_fits,
)
from flows.execution.model_shape import NAMED_SIZES, ModelShape
from stages.lib.core.errors import BadInput

WORK = Workload(
    prompt=1024, response=1024, batch=1024, mini_batch=128, micro_batch=8, episodes=102_400
)
# 2 layers of 4 * 100^2 + 3 * 100 * 200 weights, 1,000 tokens with 100 numbers, untied
SMALL = ModelShape(100, 2, 10, 10, 10, 200, 1000, tied=False)
SMALL_WEIGHTS = 2 * (40_000 + 60_000) + 2 * 100_000


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "gigabytes"),
    [("8x80", 1, 8, 80), ("2x8x80", 2, 8, 80), ("1x23.7", 1, 1, 23.7), ("4X8X141", 4, 8, 141)],
)
def test_a_cluster_is_parsed(text, nodes, gpus, gigabytes):
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, gpus)
    assert cluster.gpu_bytes == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    "text", ["", "8", "x80", "8x", "0x80", "8x0", "8x-80", "2.5x80", "a x80", "1x2x3x4", "8xinf"]
)
def test_what_is_no_cluster_is_refused(text):
    with pytest.raises(BadInput, match=r"expected GPUs x GB of one, e\.g\. 8x80"):
        parse_cluster(text)


def test_the_parts_are_those_by_hand():
    work = Workload(prompt=30, response=20, batch=16, mini_batch=8, micro_batch=4, episodes=1)
    plan = make_plan(SMALL, Cluster(1, 2, 1e9), work)
    assert plan.work == work
    sampling, scores, policy, critic = plan.phases.values()
    assert sampling["weights"] == 2 * SMALL_WEIGHTS
    assert sampling["cache"] == 0.6e9 - 2 * SMALL_WEIGHTS
    assert scores["weights"] == 2 * SMALL_WEIGHTS / 2
    assert policy["weights"] == critic["weights"] == 16 * SMALL_WEIGHTS / 2
    # a layer has as many weights as the embeddings
    assert policy["gathered"] == 2 * 2 * 100_000
    assert policy["logits"] == 4 * 50 * 1000 * 10
    assert critic["logits"] == 0
    assert scores["logits"] == 4 * 50 * 1000 * 6
    # one state of 100 numbers per token and layer, and one layer twice
    assert policy["activations"] > 4 * 50 * 2 * 100 * 2
    assert plan.ram == 2 * 16 * SMALL_WEIGHTS + 2 * 2 * SMALL_WEIGHTS
    # keys and values of 100 numbers each, in 2 layers, of 50 tokens
    assert plan.sequences == (0.6e9 - 2 * SMALL_WEIGHTS) // (2 * 2 * 100 * 2 * 50)
    assert plan.peak == max(sum(parts.values()) for parts in plan.phases.values())


def test_a_tenth_of_a_gpu_stays_free_and_vllm_needs_room_for_responses():
    work = Workload(prompt=30, response=20, batch=16, mini_batch=8, micro_batch=4, episodes=1)
    peak = make_plan(SMALL, Cluster(1, 2, 1e12), work).phases["training of the policy"]
    needed = sum(peak.values())
    assert make_plan(SMALL, Cluster(1, 2, needed / 0.89), work).fits
    plan = make_plan(SMALL, Cluster(1, 2, needed / 0.91), work)
    assert plan.work.micro_batch < 4  # with fewer at once it fits
    assert replace(plan, sequences=16).fits
    assert not replace(plan, sequences=15).fits


def test_a_vllm_engine_has_as_many_gpus_as_leave_it_room():
    for name, gigabytes, size in (("7b", 80, 1), ("7b", 40, 2), ("70b", 80, 8), ("32b", 80, 4)):
        plan = make_plan(NAMED_SIZES[name], Cluster(1, 8, gigabytes * 1e9), WORK)
        assert plan.tensor_parallel == size, name


def test_fewer_episodes_at_once_if_more_do_not_fit():
    assert make_plan(NAMED_SIZES["7b"], Cluster(1, 8, 80e9), WORK).work.micro_batch == 8
    assert make_plan(NAMED_SIZES["7b"], Cluster(1, 8, 40e9), WORK).work.micro_batch < 8


@pytest.mark.parametrize(
    ("nodes", "batches"), [(4, (1024, 128, 4)), (3, (1008, 144, 2)), (32, (1024, 256, 1))]
)
def test_a_rollout_has_whole_optimizer_steps_with_episodes_for_every_gpu(nodes, batches):
    """On 24 GPUs, 144 episodes are 6 per GPU, by 2."""
    work = make_plan(NAMED_SIZES["7b"], Cluster(nodes, 8, 80e9), WORK).work
    assert (work.batch, work.mini_batch, work.micro_batch) == batches


# verl's docs, "Hardware Resource Needed for RL": the fewest GPUs with 80 GB on which all weights
# were trained (GRPO, with offload). Here a critic takes turns with the policy.
@pytest.mark.parametrize(("name", "published"), [("7b", 2), ("14b", 4), ("72b", 32)])
def test_the_fewest_gpus_are_those_that_were_published_or_fewer(name, published):
    fewest = smallest_that_fits(NAMED_SIZES[name], Cluster(1, 1, 80e9), WORK)
    assert fewest is not None
    assert published / 2 <= fewest.cluster.gpus <= published


def test_nothing_is_smaller_than_one_gpu_and_some_models_fit_nowhere():
    fewest = smallest_that_fits(NAMED_SIZES["0.5b"], Cluster(1, 8, 80e9), WORK)
    assert fewest is not None
    assert fewest.cluster.gpus == 1
    assert smallest_that_fits(NAMED_SIZES["72b"], Cluster(1, 8, 4e9), WORK) is None


# OpenRLHF on A800, seconds per 1,024 prompts: its comparison with DeepSpeed-Chat, up to 2,048
# tokens. The constant of the estimate is their median.
@pytest.mark.parametrize(
    ("weights", "gpus", "seconds"),
    [(7, 16, 471.11), (13, 32, 608.93), (34, 32, 1526.4), (70, 32, 4488.53)],
)
def test_the_hours_are_within_the_range_of_published_runs(weights, gpus, seconds):
    layer = ModelShape(1000, 1, 1, 1, 1000, 1000, 0)  # 7e6 weights
    shape = ModelShape(1000, round(weights * 1e9 / layer.weights), 1, 1, 1000, 1000, 0)
    work = Workload(1024, 1024, 1024, 128, 8, 1024)
    estimate = hours(shape, Cluster(gpus // 8, 8, 80e9), work) * 3600
    assert 1 / 1.5 < estimate / seconds < 1.5
