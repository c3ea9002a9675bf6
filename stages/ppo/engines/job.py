"""What the engines' jobs have in common: files, inputs, command, metrics."""

import json
import random
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_json, write_json
from stages.lib.core.params import Params
from stages.lib.core.params.engines import Options
from stages.lib.core.types import StepMetrics
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.ppo.common.episodes import Episode, planned_updates

CODE = Path(__file__).parent
CHECK = "rondo_check.py"
MISSING = "reading an engine's metrics needs tensorboard: pip install -e '.[engines]'"


class EngineJob(ABC):
    """The job of one run, in a folder that the cluster must see under the same path.

    Args:
        params: all params.
        folder: of the job.
        sft: folder of the SFT model, which is policy and reference.
        reward: folder of the reward model, from which the critic starts, too.
    """

    name: ClassVar[str]  # value of `ppo.engine`, and the engine's package, as pip names it
    title: ClassVar[str]  # as its authors write it
    version: ClassVar[str]  # the only one that is known
    # options that Rondo needs as they are, or all options below a name; those of them that the user
    # may set all the same
    needed: ClassVar[Collection[str]]
    free: ClassVar[Collection[str]] = ()
    tags: ClassVar[Mapping[str, str]]  # the engine's names of metrics; Rondo's names
    # what the engine writes some time after the other metrics of an update; "": it writes all of
    # them one after the other
    last_tag: ClassVar[str] = ""
    plugin: ClassVar[str] = ""  # Rondo's code that runs in the engine's environment
    next_run: ClassVar[str] = "continues from the engine's last checkpoint"  # after a failed job

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        self.params, self.folder = params, folder.resolve()
        self.sft, self.reward = sft.resolve(), reward.resolve()
        self.record = self.folder / "job.json"  # the jobs of this run
        self.log = self.folder / "engine.log"  # the engine's output
        self.refusal = self.folder / "refusal.txt"  # why it cannot read its options
        self.prompts = self.folder / "prompts.jsonl"
        self.states = self.folder / "states"  # checkpoints, from which the engine resumes
        self.kept = self.folder / "policies"  # those that Rondo's plugin has kept
        self.events = self.folder / "tensorboard"  # TensorBoard's files
        self.critic_start = self.folder / "critic"

    @abstractmethod
    def placement(self) -> Options:
        """Where the models run: all of them on all GPUs, by turns. The user's options replace
        these.
        """

    @abstractmethod
    def chosen(self) -> dict[str, Any]:
        """The options that Rondo sets."""

    def options(self) -> dict[str, Any]:
        """All options of a job that begins, or that continues from the last checkpoint in `states`,
        if the engine can.
        """
        return self.placement() | self.params.ppo.engine_options | self.chosen()

    @abstractmethod
    def workers(self) -> dict[str, int]:
        """The data-parallel workers of each role that is trained; 0: it has no GPU."""

    def check(self) -> None:
        """
        Raises:
            BadInput: Rondo sets an option of the user, or needs it as it is; or the workers do not
                get whole micro-batches, which the engine would find after it has loaded the models.
        """
        ppo = self.params.ppo
        may_set = dict.fromkeys(self.needed, False) | dict.fromkeys(self.free, True)
        may_set |= dict.fromkeys(self.chosen(), False)
        for option in ppo.engine_options:
            name = option.lstrip("+~")  # of Hydra
            above = [name, *(name[: dot.start()] for dot in re.finditer(r"\.", name))]
            known = [place for place in above if place in may_set]
            if known and not may_set[max(known, key=len)]:
                raise BadInput(
                    f"ppo.engine_options.{option}: Rondo sets it by other keys of params.yaml "
                    "(docs/engines.md), or needs it as it is: remove it here"
                )
        for role, workers in self.workers().items():
            if not workers or ppo.mini_batch_size % (ppo.micro_batch_size * workers):
                raise BadInput(
                    f"ppo.engine {self.name}: ppo.mini_batch_size {ppo.mini_batch_size} must be a "
                    f"multiple of ppo.micro_batch_size {ppo.micro_batch_size} times the {workers} "
                    f"data-parallel workers of the {role}: change them, or launcher.nodes and "
                    "launcher.gpus_per_node"
                )

    def write_inputs(self, episodes: Sequence[Episode], tokenizer: Any) -> int:
        """Write the prompts of all updates, in passes over all prompts, each in an order of its
        own, and what else the engine reads.

        Engines read texts. A prompt whose text they would read as other tokens, e.g. since it was
        cut to `prepare.max_prompt_tokens`, is left out.

        Returns:
            The number of prompts that were left out.

        Raises:
            BadInput: all of them would be.
        """
        params = self.params
        texts = [prompt_text(tokenizer, row["prompt"], params) for row, _ in episodes]
        ids = tokenizer(texts, add_special_tokens=False).input_ids
        kept = [
            {"prompt": text, "id": row["id"]}
            for text, read, (row, tokens) in zip(texts, ids, episodes, strict=True)
            if read == tokens
        ]
        if not kept:
            raise BadInput(
                f"ppo.engine {self.name}: no prompt has the same tokens when it is read as a text; "
                "raise prepare.max_prompt_tokens, which cuts prompts"
            )
        order = random.Random(params.seed)
        number = planned_updates(params.ppo) * params.ppo.batch_size
        rows: list[dict[str, str]] = []
        while len(rows) < number:
            rows += order.sample(kept, len(kept))
        self.write_prompts(rows[:number], tokenizer)
        return len(episodes) - len(kept)

    @abstractmethod
    def write_prompts(self, rows: Sequence[Mapping[str, str]], tokenizer: Any) -> None:
        """Write rows with `prompt`, a text with BOS if the model has one, and `id`."""

    def write_plugin(self, values: Any) -> None:
        """Copy the plugin to the job's folder, with values in a JSON file beside it."""
        path = self.folder / self.plugin
        write_json(path.with_suffix(".json"), values)
        shutil.copy(CODE / self.plugin, path)

    def calibration(self) -> tuple[float, float]:
        """Mean and standard deviation of the reward model's raw scores."""
        config = read_json(self.reward / "config.json")
        return config["mean"], config["std"]

    @abstractmethod
    def arguments(self) -> list[str]:
        """The options as the engine's command reads them."""

    @abstractmethod
    def words(self) -> list[str]:
        """The engine's command."""

    def command(self) -> str:
        """The shell command of a job: the engine's check of its options, and the engine."""
        return self._in_folder(f"python3 {CHECK} && {shlex.join(self.words())}")

    def check_command(self) -> str:
        """The shell command of a job that checks the options alone."""
        return self._in_folder(f"python3 {CHECK}")

    def _in_folder(self, command: str) -> str:
        """The command in the job's folder, from which Ray's workers import; its output also goes to
        `log`. What the check reads is written there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        check = {"engine": self.name, "expected": self.version, "options": self.arguments()}
        write_json((self.folder / CHECK).with_suffix(".json"), check)
        shutil.copy(CODE / CHECK, self.folder)
        run = f"cd {shlex.quote(str(self.folder))} && {command}"
        line = f"{{ {run}; }} 2>&1 | tee -a {shlex.quote(str(self.log))}"
        return f"bash -o pipefail -c {shlex.quote(line)}"

    def raise_refusal(self) -> None:
        """
        Raises:
            BadInput: the engine has refused the options of the last job.
        """
        if self.refusal.exists():
            raise BadInput(
                f"ppo.engine {self.name}: {self.title} {self.version} refuses its options: "
                f"{self.refusal.read_text().strip()}\nNext: mend ppo.engine_options, or the key of "
                "params.yaml that sets this option (docs/engines.md)"
            )

    @abstractmethod
    def policies(self, last: int, ended: bool) -> dict[int, Path]:
        """The complete saved policies by update, which are Hugging Face's folders.

        Args:
            last: the last update whose metrics are known.
            ended: whether the job has succeeded.
        """

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Metrics of one update, with Rondo's names and definitions."""
        others = {name: value for name, value in values.items() if name != "truncated_rate"}
        truncated = values.get("truncated_rate")
        return others if truncated is None else others | {"eos_rate": 1 - truncated}

    def failed_episodes(self) -> int:
        """Episodes that the engine has left out, and says so in its output alone."""
        return 0

    def last_lines(self, number: int = 20) -> str:
        """The end of the engine's output."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-number:])


def prompt_text(tokenizer: Any, prompt: Any, params: Params) -> str:
    """A prompt as an engine reads it, which adds no special tokens."""
    rendered = render_prompt(tokenizer, prompt, params.prepare.prompt_format)
    return text_with_bos(tokenizer, rendered)


def write_critic(reward: Path, target: Path, engine: str) -> None:
    """Write a token classifier whose value of a token is the reward model's calibrated score, as
    Rondo's critic has it: the engine would start from the score before calibration.

    Raises:
        BadInput: the head of the architecture's token classifier is not that of a reward model.
    """
    # imported here: takes seconds
    from transformers import AutoModelForTokenClassification

    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    critic = AutoModelForTokenClassification.from_pretrained(
        reward, dtype="auto", trust_remote_code=False
    )
    head = getattr(critic, "score", None)
    if head is None or head.bias is None:
        raise BadInput(
            f"ppo.engine {engine}: {type(critic).__name__} cannot start from a reward model, as "
            "its head is another one: use openrlhf, or another base model"
        )
    mean, std = critic.config.mean, critic.config.std
    head.weight.data /= std
    head.bias.data.fill_(-mean / std)
    critic.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def check_installed() -> None:
    """
    Raises:
        RondoError: what reads an engine's metrics is not installed.
    """
    if find_spec("tensorboard") is None:
        raise RondoError(MISSING)


class EngineMetrics:
    """Reads the metrics of a job from its TensorBoard files, also while they grow.

    Raises:
        RondoError: tensorboard is not installed.
    """

    def __init__(self, job: EngineJob) -> None:
        check_installed()
        self.job = job
        self.events: Any = None  # the reader fails without its folder

    def read(self, ended: bool = False) -> list[StepMetrics]:
        """All complete updates so far, in order. Of an update that was made twice, since a job was
        resumed, the later one.

        The writer's buffer may end in the middle of an update. So without a `last_tag` the newest
        one counts as complete if it has all metrics of the one before, or the job has succeeded.

        Args:
            ended: whether the job has succeeded.
        """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        job = self.job
        if not job.events.exists():
            return []
        if self.events is None:  # scalars 0: keep all of them
            self.events = EventAccumulator(str(job.events), size_guidance={"scalars": 0})
        self.events.Reload()
        steps: dict[int, dict[str, float]] = {}
        written: list[str] = self.events.Tags()["scalars"]
        for tag, name in job.tags.items():
            for event in self.events.Scalars(tag) if tag in written else ():
                steps.setdefault(event.step, {})[name] = event.value
        complete = set(steps)
        if job.last_tag:
            last = self.events.Scalars(job.last_tag) if job.last_tag in written else []
            complete &= {event.step for event in last}
        elif complete and not ended:
            *earlier, newest = sorted(complete)
            if not (earlier and steps[newest].keys() >= steps[earlier[-1]].keys()):
                complete.remove(newest)
        return [{"step": step, **job.metrics(steps[step])} for step in sorted(complete)]


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """The files or folders that match a pattern, by the number in their names."""
    return {int(re.sub(r"\D", "", path.name)): path for path in folder.glob(pattern)}


def count(options: Mapping[str, Any], name: str) -> int:
    """The value of an option that counts something; 1 if it does not, which the engine refuses."""
    value = options.get(name, 1)
    return value if isinstance(value, int) and value > 0 else 1


def hydra_value(value: Any) -> str:
    """A value of JSON in the grammar of Hydra's overrides, which verl and NeMo RL read.

    >>> print(hydra_value("it's"), hydra_value(True), hydra_value(0.5), hydra_value(["a", 1]))
    'it\\'s' true 0.5 ['a',1]
    >>> print(hydra_value({"a": None}))
    {a:null}
    """
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{hydra_value(item)}' for key, item in value.items())}}}"
    if not isinstance(value, str):
        return json.dumps(value)
    # backslashes count only before a quote, and before the closing one
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), value)
    return f"'{text}'"


def hydra_words(options: Mapping[str, Any]) -> list[str]:
    """Hydra's overrides; a name that begins with `+` adds a key that the config does not have."""
    return [f"{name}={hydra_value(value)}" for name, value in options.items()]
