"""PPO on models whose layers are divided among two processes does what one process does."""

import shutil

from safetensors.torch import load_file

from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params
from tests.stages.ppo.stage_process import OUTPUTS, delete_outputs
from tests.stages.ppo.test_processes import (
    assert_close,
    delete_everything,
    finish,
    kill_one_of_two,
    on_the_cpu,  # noqa: F401 - a fixture
    write_params,
)

# in micro-batches of one episode, so that one process has more of them than the other
WHOLE = {"lora": {"r": 0}, "critic_lora": {"r": 0}, "learning_rate": 1e-3, "micro_batch_size": 1}


def texts() -> list[str]:
    """The sampled responses of all updates."""
    rows = [row for path in sorted(OUTPUTS.glob("rollouts/*")) for row in read_jsonl(path, "")]
    return [row["response"] for row in rows]


def test_two_processes_with_half_of_each_layer_do_what_one_does(small_round: Params) -> None:
    """Also if they are killed; a state of theirs is resumed by themselves, and by one process."""
    write_params(small_round, 1, **WHOLE)
    one, one_texts = finish("model"), texts()
    checkpoint = "checkpoints/step_00002/model.safetensors"
    one_checkpoint = load_file(OUTPUTS / checkpoint)

    delete_everything()
    write_params(small_round, 2, shard=True, **WHOLE)
    two = finish("model")
    # of 73,984 weights in layers the half, and 27,904 of embeddings and norm
    assert "each process holds 63.7% of the policy's weights" in two["output"]
    assert texts() == one_texts
    assert_close(two, one)
    assert_close(
        two | {"policy": load_file(OUTPUTS / checkpoint)}, one | {"policy": one_checkpoint}
    )

    delete_everything()
    kill_one_of_two(2)
    delete_outputs()
    shutil.copytree(".rondo", "killed")
    resumed = finish("model")
    assert "resumes from here" in resumed["output"]
    assert resumed["bytes"] == two["bytes"]

    delete_everything()
    shutil.copytree("killed", ".rondo")
    write_params(small_round, 1, **WHOLE)
    resumed = finish("model")
    assert "resumes from here" in resumed["output"]
    assert_close(resumed, one)
