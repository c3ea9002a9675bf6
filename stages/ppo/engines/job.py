"""What the engines' jobs have in common: files, inputs, command, metrics."""

import random
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params import Params
from stages.lib.core.params.engine_settings import EngineSettings
from stages.lib.core.types import StepMetrics
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.ppo.common.episodes import Episode, planned_updates

MISSING = "reading an engine's metrics needs tensorboard: pip install -e '.[engines]'"


class EngineJob(ABC):
    """The job of one run, in a folder that the cluster must see under the same path.

    Args:
        params: all params.
        folder: of the job.
        sft: folder of the SFT model, which is policy and reference.
        reward: folder of the reward model, from which the critic starts, too.

    Attributes:
        settings: of the engine.
        package: of the engine, as pip names it. module: its command.
        tags: the engine's names of metrics; Rondo's names.
        last_tag: what the engine writes some time after the other metrics of an update; "": it
            writes all of them one after the other.
        next_run: what the run after a failed job does.
        record: the jobs of this run. log: the engine's output.
        states: checkpoints, from which the engine resumes. events: folder of TensorBoard's files.
        critic: the trained critic; None: there is none.
    """

    settings: ClassVar[EngineSettings]
    package: ClassVar[str]
    module: ClassVar[str]
    tags: ClassVar[Mapping[str, str]]
    last_tag: ClassVar[str] = ""
    next_run: ClassVar[str] = "continues from the engine's last checkpoint"

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        self.params, self.folder = params, folder.resolve()
        self.sft, self.reward = sft.resolve(), reward.resolve()
        self.record, self.log = self.folder / "job.json", self.folder / "engine.log"
        self.states, self.events = self.folder / "states", self.folder / "tensorboard"
        self.critic: Path | None = None

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
        params, name = self.params, self.settings.name
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
        """The words after the program: all options of a job that begins, or that continues from
        the last checkpoint in `states`, if the engine can.
        """

    def words(self) -> list[str]:
        """The engine's command."""
        return ["python3", "-m", self.module, *self.arguments()]

    def command(self) -> str:
        """The shell command of a job, which refuses another version of the engine, and whose
        output also goes to `log`.
        """
        package, version = self.package, self.settings.version
        check = (
            f"import sys; from importlib.metadata import version; v = version('{package}'); "
            f"sys.exit(0 if v.partition('+')[0] == '{version}' else "  # +: of which commit
            f"f'the Ray cluster has {package} {{v}}, and Rondo needs {version}')"
        )
        # in the job's folder: from there Ray's workers can import, and an engine may write there
        run = (
            f"cd {shlex.quote(str(self.folder))} && python3 -c {shlex.quote(check)} && "
            f"{shlex.join(self.words())}"
        )
        line = f"{{ {run}; }} 2>&1 | tee -a {shlex.quote(str(self.log))}"
        return f"bash -o pipefail -c {shlex.quote(line)}"

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
