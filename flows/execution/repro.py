"""`python -m flows.execution.repro ADDRESS`: what `dvc repro --single-item ADDRESS` does, by DVC's
own `Stage.reproduce`, with another writer of dvc.lock.

DVC parses and writes the whole file with its comments for each stage, in Python: more than a second
for two rounds, and as much again for every two more. And it empties the file first, so that a kill
meanwhile loses the records of all stages.
"""

import io
import re
import sys
from collections import OrderedDict
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from flows.core.locks import LOCK, read_lock_file
from stages.lib.core.errors import RondoError, chain_of, print_failure, typed
from stages.lib.core.files import write_text
from stages.lib.core.judge_answers import answers_are_gone

EXIT_CODE = re.compile(r"exited with (-?\d+)$")


class Representer(SafeRepresenter):
    """As DVC's: None without a word, and an ordered mapping as any other."""


Representer.add_representer(
    type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "")
)
Representer.add_representer(OrderedDict, SafeRepresenter.represent_dict)


def main() -> None:
    [address] = sys.argv[1:]
    from dvc.exceptions import DvcException
    from dvc.logger import setup
    from dvc.scm import SCMError
    from dvc.stage.exceptions import StageCmdFailedError

    setup()  # prints what DVC does
    try:
        reproduce(address)
    except StageCmdFailedError as error:
        match = EXIT_CODE.search(str(error))
        code = int(match[1]) if match else 1
        sys.exit(code if code > 0 else 128 - code)  # of a signal, as a shell's
    except (DvcException, SCMError) as error:
        sys.exit(print_failure(typed(error) or RondoError(dvc_message(error)), address))
    except (OSError, RondoError) as error:
        sys.exit(print_failure(error, address))


def dvc_message(error: Exception) -> str:
    """What DVC and git say of an error of theirs and of those that led to it."""
    from dvc.exceptions import DvcException
    from dvc.scm import SCMError

    return ": ".join(
        str(one) for one in chain_of(error) if isinstance(one, DvcException | SCMError)
    )


def reproduce(address: str) -> None:
    """Run a stage, or restore its outputs from DVC's cache, unless nothing has changed."""
    from dvc.repo import Repo, lock_repo

    # DVC gives up after 3 s by default. Another `dvc` in this folder, e.g. `dvc push`, may hold the
    # lock for longer, and the outputs of a stage that cannot be recorded are lost.
    with Repo(".", _wait_for_lock=True) as repo, lock_repo(repo), repo.scm_context(quiet=True):
        (stage,) = repo.stage.collect(address)
        # with the answers, DVC's cache of runs is out of date, too
        if stage.reproduce(force=answers_are_gone(address)):
            record(stage)


def record(stage: Any) -> None:
    """Write a stage's entry of dvc.lock; the file is replaced at once, and has DVC's form (but for
    where long texts in quotation marks are folded).
    """
    from dvc.stage.serialize import to_lockfile

    yaml = YAML(typ="safe")
    yaml.Representer = Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    content = read_lock_file() or {"schema": "2.0", "stages": {}}
    content["stages"] |= to_lockfile(stage)
    text = io.StringIO()
    yaml.dump(content, text)
    write_text(LOCK, text.getvalue().replace(": \n", ":\n"))


if __name__ == "__main__":
    main()
