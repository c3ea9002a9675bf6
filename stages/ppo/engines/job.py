"""What the engines' jobs have in common: files, inputs, command, metrics."""

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
from stages.lib.core.files import write_json
from stages.lib.core.params import Params
from stages.lib.core.params.engines import Options
from stages.lib.core.types import StepMetrics
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.ppo.common.episodes import Episode, planned_updates

CHECK = Path(__file__).with_name("rondo_check.py")
MISSING = "reading an engine's metrics needs tensorboard: pip install -e '.[engines]'"


class EngineJob(ABC):
    """The job of one run, in a folder that the cluster must see under the same path.

    Args:
        params: all params.
        folder: of the job.
        sft: folder of the SFT model, which is policy and reference.
        reward: folder of the reward model, from which the critic starts, too.

    Attributes:
        name: value of `ppo.engine`, and the engine's package, as pip names it.
        title: as its authors write it.
        version: the only one that is known.
        needed: options that Rondo needs as they are, or all options below a name; free: which of
            those the user may set all the same.
        tags: the engine's names of metrics; Rondo's names.
        last_tag: what the engine writes some time after the other metrics of an update; "": it
            writes all of them one after the other.
        next_run: what the run after a failed job does.
        record: the jobs of this run. log: the engine's output. refusal: why it cannot read its
            options, in its own words.
        states: checkpoints, from which the engine resumes. events: folder of TensorBoard's files.
        critic: the trained critic; None: there is none.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    needed: ClassVar[Collection[str]]
    free: ClassVar[Collection[str]] = ()
    tags: ClassVar[Mapping[str, str]]
    last_tag: ClassVar[str] = ""
    next_run: ClassVar[str] = "continues from the engine's last checkpoint"

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        self.params, self.folder = params, folder.resolve()
        self.sft, self.reward = sft.resolve(), reward.resolve()
        self.record, self.log = self.folder / "job.json", self.folder / "engine.log"
        self.refusal = self.folder / "refusal.txt"
        self.states, self.events = self.folder / "states", self.folder / "tensorboard"
        self.critic: Path | None = None

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
        params, name = self.params, self.name
        prompts = [row["prompt"] for row, _ in episodes]
        texts = [prompt_text(tokenizer, prompt, params) for prompt in prompts]
        ids = tokenizer(texts, add_special_tokens=False).input_ids
        kept = [
            {"prompt": text, "id": row["id"]}
            for text, read, (row, tokens) in zip(texts, ids, episodes, strict=True)
            if read == tokens
        ]
        if not kept:
            raise BadInput(
                f"ppo.engine {name}: no prompt has the same tokens when it is read as a text; "
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

    @abstractmethod
    def arguments(self) -> list[str]:
        """The options as the engine's command reads them."""

    @abstractmethod
    def words(self) -> list[str]:
        """The engine's command."""

    def command(self) -> str:
        """The shell command of a job: the engine's check of its options, and the engine."""
        return self._in_folder(f"python3 {CHECK.name} && {shlex.join(self.words())}")

    def check_command(self) -> str:
        """The shell command of a job that checks the options alone."""
        return self._in_folder(f"python3 {CHECK.name}")

    def _in_folder(self, command: str) -> str:
        """The command in the job's folder, from which Ray's workers import; its output also goes to
        `log`. What the check reads is written there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        check = {"engine": self.name, "expected": self.version, "options": self.arguments()}
        write_json(self.folder / CHECK.with_suffix(".json").name, check)
        shutil.copy(CHECK, self.folder)
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
        """Metrics of one update, under Rondo's names, with Rondo's definitions."""
        return renamed(values)

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
        for tag in written:
            if (name := job.tags.get(tag)) is not None:
                for event in self.events.Scalars(tag):
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


def renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one update with Rondo's definitions."""
    others = {name: value for name, value in metrics.items() if name != "truncated_rate"}
    truncated = metrics.get("truncated_rate")
    return others if truncated is None else others | {"eos_rate": 1 - truncated}


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
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    # backslashes count only before a quote, and before the closing one
    text = re.sub(
        r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), str(value)
    )
    return f"'{text}'"


def hydra_words(options: Mapping[str, Any]) -> list[str]:
    """Hydra's overrides; a name that begins with `+` adds a key that the config does not have."""
    return [f"{name}={hydra_value(value)}" for name, value in options.items()]
