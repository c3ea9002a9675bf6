"""The user's own reward functions, and the arguments that each one gets."""

import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stages.lib.core.errors import BadInput
from stages.ppo.common.reward_results import (
    RewardInputs,
    RewardResult,
    all_failed,
    read_results,
)

COMPLETIONS = "completions"  # TRL's name for responses


class FunctionReward:
    """Scores by the user's own function.

    A function with a parameter `completions` gets all arguments by keyword, as from TRL's
    GRPOTrainer. Of any other the first two arguments are prompts and responses. Further parameters
    get, by their names, the values of `RewardInputs.arguments`; `**columns` gets all of them that
    no other parameter has.

    Args:
        function: returns one number per response; None: this reward failed.
        key: where params.yaml names it, for error messages.

    Example:
        >>> def equal(prompts, responses, answer):
        ...     return [float(r == a) for r, a in zip(responses, answer, strict=True)]
        >>> row = {"id": "1", "prompt": "2 + 2 =", "columns": {"answer": " 4"}}
        >>> FunctionReward(equal, "key")(RewardInputs([row], [" 4"], [True], [2]))
        [1.0]
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.function, self.key = function, key
        try:
            parameters = dict(inspect.signature(function).parameters)
        except ValueError:  # of some compiled functions nobody knows the parameters
            parameters = {}
        self.by_keyword = COMPLETIONS in parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [name for name, parameter in parameters.items() if parameter.kind in kinds]
        self.positional = [] if self.by_keyword else names[:2]
        self.names = names[len(self.positional) :]
        self.required = {
            name for name in self.names if parameters[name].default is inspect.Parameter.empty
        }

    def __call__(self, inputs: RewardInputs) -> list[RewardResult]:
        number = len(inputs.texts)
        try:
            return read_results(self.call(inputs), number)
        # the user's code may raise anything
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            line = f"({frame.filename}, line {frame.lineno})"
            return all_failed(number, f"{type(error).__name__}: {error} {line}")

    def call(self, inputs: RewardInputs) -> Any:
        arguments = inputs.arguments
        if self.by_keyword:
            arguments |= {"prompts": inputs.prompts, COMPLETIONS: list(inputs.texts)}
        keywords = self.chosen(arguments)
        # a batch may consist of reported prompts only, which have no columns
        keywords |= {name: [None] * len(inputs.texts) for name in self.required - keywords.keys()}
        if self.by_keyword:
            return self.function(**keywords)
        return self.function(inputs.prompts, inputs.texts, **keywords)

    def chosen(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that the function takes."""
        return {
            name: values
            for name, values in arguments.items()
            if name in self.names or (self.takes_all and name not in self.positional)
        }

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the prompts have every column that the function requires.

        Raises:
            BadInput: names the function's key and the columns that are missing.
        """
        given = {*columns, "prompts", COMPLETIONS, *RewardInputs([], [], [], []).arguments}
        if missing := sorted(self.required - given):
            raise BadInput(
                f"{self.key}: its function requires {', '.join(missing)}, which no training prompt "
                "has: add the columns to prepare.columns, or give the parameters a default"
            )
