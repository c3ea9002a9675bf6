"""OpenRLHF's command, its inputs, and what it writes.

Read in the source of the version of `stages/lib/core/params/openrlhf.py`: `cli/train_ppo_ray.py`,
`trainer/ppo_trainer.py`, `trainer/ray/ppo_actor.py`.
"""

import random
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params, openrlhf
from stages.lib.core.params.openrlhf import Options
from stages.lib.core.types import StepMetrics
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.ppo.common.episodes import Episode, planned_updates

PROGRAM = "python3 -m openrlhf.cli.train_ppo_ray"
# Other versions have other options, and argparse takes what an unknown one abbreviates
CHECK = (
    "import sys; from importlib.metadata import version; v = version('openrlhf'); "
    f"sys.exit(0 if v == '{openrlhf.VERSION}' else "
    f"f'the Ray cluster has openrlhf {{v}}, and Rondo needs {openrlhf.VERSION}')"
)
RUN_NAME = "rondo"  # of the folder with the metrics
MISSING = "reading OpenRLHF's metrics needs tensorboard: pip install -e '.[engines]'"

# OpenRLHF's names of metrics, without `train/`; Rondo's names. `kl` is a mean over the tokens of
# each response, and the reward is the calibrated score, before it is clipped.
METRICS = {
    "policy_loss": "policy_loss",
    "critic_loss": "value_loss",
    "ppo_clip_ratio": "clip_fraction",
    "entropy_loss": "entropy",
    "actor_grad_norm": "policy_grad_norm",
    "critic_grad_norm": "critic_grad_norm",
    "actor_lr": "learning_rate",
    "kl": "kl_per_token",
    "rollout/reward_mean": "score_mean",
    "rollout/reward_std": "score_std",
    "rollout/response_length_mean": "response_length",
    "rollout/truncated_rate": "truncated_rate",
}


class JobFiles:
    """The files of a job, in a folder that the cluster must see under the same path.

    Attributes:
        states: checkpoints: DeepSpeed's in `_actor` and `_critic`, and `global_step<n>_hf`.
        final, critic: the trained models.
        metrics: of TensorBoard. log: the engine's output. job: the jobs of this run.
    """

    def __init__(self, folder: Path) -> None:
        self.prompts, self.job = folder / "prompts.jsonl", folder / "job.json"
        self.states, self.final = folder / "states", folder / "final"
        self.critic = folder / "final_critic"  # OpenRLHF's name for it
        self.metrics, self.log = folder / "tensorboard", folder / "engine.log"

    def last_lines(self, number: int = 20) -> str:
        """The end of the engine's output."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-number:])

    def checkpoints(self, complete: int, ended: bool) -> dict[int, Path]:
        """The saved policies by update.

        Args:
            complete: the last update whose metrics are known. They are written before its
                checkpoint, so that one may be in the making.
            ended: whether the job has succeeded, so that all are complete.
        """
        folders = {
            int(folder.name.removeprefix("global_step").removesuffix("_hf")): folder
            for folder in self.states.glob("global_step*_hf")
        }
        return {
            update: folder
            for update, folder in sorted(folders.items())
            if ended or update < complete
        }


def write_prompts(
    path: Path, episodes: Sequence[Episode], tokenizer: object, params: Params
) -> int:
    """Write the prompts of all updates, in passes over all prompts, each in an order of its own.

    OpenRLHF reads texts. A prompt whose text it would read as other tokens, e.g. since it was cut
    to `prepare.max_prompt_tokens`, is left out.

    Returns:
        The number of prompts that were left out.

    Raises:
        BadInput: all of them would be.
    """
    texts = [
        text_with_bos(
            tokenizer, render_prompt(tokenizer, row["prompt"], params.prepare.prompt_format)
        )
        for row, _ in episodes
    ]
    ids = tokenizer(texts, add_special_tokens=False).input_ids  # type: ignore[operator]
    kept = [
        {"prompt": text, "id": row["id"]}
        for text, read, (row, tokens) in zip(texts, ids, episodes, strict=True)
        if read == tokens
    ]
    if not kept:
        raise BadInput(
            "ppo.engine openrlhf: no prompt has the same tokens when it is read as a text; raise "
            "prepare.max_prompt_tokens, which cuts prompts"
        )
    order, number = random.Random(params.seed), planned_updates(params.ppo) * params.ppo.batch_size
    rows: list[dict[str, str]] = []
    while len(rows) < number:
        rows += order.sample(kept, len(kept))
    write_jsonl(path, rows[:number])
    return len(episodes) - len(kept)


def options(params: Params, files: JobFiles, sft: Path, reward: Path, resumes: bool) -> Options:
    """All options of the command.

    Args:
        params: all params.
        files: of the job.
        sft: folder of the SFT model, which is policy and reference.
        reward: folder of the reward model, from which the critic starts, too.
        resumes: whether to continue from the checkpoints in `files.states`.
    """
    ppo, launcher = params.ppo, params.launcher
    warmup = ppo.warmup_updates / planned_updates(ppo)
    chosen: Options = {
        "actor.model_name_or_path": str(sft.resolve()),
        "reward.model_name_or_path": str(reward.resolve()),
        "critic.model_name_or_path": str(reward.resolve()),
        "reward.normalize_enable": True,  # by mean and std of the reward model's config.json
        "reward.clip_range": [-ppo.score_clip, ppo.score_clip],
        "data.prompt_dataset": str(files.prompts.resolve()),
        "data.input_key": "prompt",
        "data.max_len": params.prepare.max_prompt_tokens + ppo.response_length,
        "rollout.batch_size": ppo.batch_size,
        "rollout.micro_batch_size": ppo.micro_batch_size,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": ppo.response_length,
        "rollout.temperature": ppo.temperature,
        "rollout.top_p": 1.0,
        "train.num_episodes": 1,  # the file has the prompts of all updates
        "train.batch_size": ppo.mini_batch_size,
        "train.micro_batch_size": ppo.micro_batch_size,
        "train.max_epochs": ppo.num_ppo_epochs,
        "train.seed": params.seed,
        "algo.advantage.estimator": "gae",
        "algo.advantage.gamma": ppo.gamma,
        "algo.advantage.lambd": ppo.lam,
        "algo.kl.init_coef": ppo.kl_coef,
        "algo.kl.estimator": "k1",
        "actor.adam.lr": ppo.learning_rate,
        "actor.eps_clip": ppo.cliprange,
        "actor.entropy_coef": ppo.entropy_coef,
        "actor.max_norm": ppo.max_grad_norm,
        "actor.lr_warmup_ratio": warmup,
        "actor.gradient_checkpointing_enable": ppo.gradient_checkpointing,
        "critic.adam.lr": ppo.critic_learning_rate,
        "critic.value_clip": ppo.cliprange_value,
        "critic.max_norm": ppo.max_grad_norm,
        "critic.lr_warmup_ratio": warmup,
        "critic.save_value_network": True,
        "ckpt.path": str(files.states.resolve()),
        "ckpt.output_dir": str(files.final.resolve()),
        "ckpt.save_steps": ppo.validation_updates,
        "ckpt.save_hf": True,
        "ckpt.max_num": 1,  # DeepSpeed's, to resume from; it leaves those of Hugging Face
        "ckpt.load_enable": resumes,
        "logger.tensorboard_dir": str(files.metrics.resolve()),
        "logger.wandb.run_name": RUN_NAME,
    }
    placed = openrlhf.placement(launcher.nodes, launcher.gpus_per_node, ppo.engine_options)
    return placed | chosen


def arguments(chosen: Options) -> list[str]:
    """The command line of options: `--name value`; a switch is there or not.

    >>> arguments({"train.seed": 1, "ckpt.save_hf": True, "reward.clip_range": [-5.0, 5.0]})
    ['--train.seed', '1', '--ckpt.save_hf', '--reward.clip_range', '-5.0', '5.0']
    """
    words: list[str] = []
    for name, value in chosen.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def command(chosen: Options, log: Path) -> str:
    """The shell command of a job, whose output also goes to a file."""
    run = f"python3 -c {shlex.quote(CHECK)} && {PROGRAM} {shlex.join(arguments(chosen))}"
    line = f"{{ {run}; }} 2>&1 | tee -a {shlex.quote(str(log.resolve()))}"
    return f"bash -o pipefail -c {shlex.quote(line)}"


def check_installed() -> None:
    """
    Raises:
        RondoError: what reads OpenRLHF's metrics is not installed.
    """
    if find_spec("tensorboard") is None:
        raise RondoError(MISSING)


class EngineMetrics:
    """Reads the metrics of a job from its TensorBoard files, also while they grow.

    Raises:
        RondoError: tensorboard is not installed.
    """

    def __init__(self, files: JobFiles) -> None:
        check_installed()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = files.metrics / RUN_NAME
        folder.mkdir(parents=True, exist_ok=True)  # the reader fails without it
        # scalars 0: keep all of them
        self.events = EventAccumulator(str(folder), size_guidance={"scalars": 0})

    def read(self) -> list[StepMetrics]:
        """All updates so far, in order. Of an update that was made twice, since a job was resumed,
        the later one.
        """
        self.events.Reload()
        steps: dict[int, dict[str, float]] = {}
        for tag in self.events.Tags()["scalars"]:
            if (name := METRICS.get(tag.removeprefix("train/"))) is not None:
                for event in self.events.Scalars(tag):
                    steps.setdefault(event.step, {})[name] = event.value
        return [{"step": step, **renamed(steps[step])} for step in sorted(steps)]


def renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one update with Rondo's definitions."""
    others = {name: value for name, value in metrics.items() if name != "truncated_rate"}
    truncated = metrics.get("truncated_rate")
    return others if truncated is None else others | {"eos_rate": 1 - truncated}
