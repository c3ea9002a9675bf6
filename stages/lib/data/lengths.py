"""Lengths of prompts, responses and training texts, checked together before a run and per text.

A text is never cut without an EOS at its end: the reward model is read at EOS, so it is trained
there, and SFT teaches EOS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.shared import Overlong, TrainParams
from stages.lib.core.progress import tracked
from stages.lib.core.types import TokenIds
from stages.lib.data.prompts import cut_to, encode

Row = TypeVar("Row", bound=Mapping[str, Any])
Section = Literal["sft", "reward"]


@dataclass(frozen=True)
class TokenizedRows(Generic[Row]):
    """Rows that fit, and their tokens.

    rows: N rows. prompts: N prompts. responses: by column, N responses that end with EOS.
    overlong: number of rows that were longer than max_length, which are left out or closed.
    """

    rows: list[Row]
    prompts: list[TokenIds]
    responses: dict[str, list[TokenIds]]
    overlong: int

    def texts(self, column: str) -> list[TokenIds]:
        """Prompt and response of a column, as one list of tokens per row."""
        return [p + r for p, r in zip(self.prompts, self.responses[column], strict=True)]


def tokenize_fitting(
    tokenizer: Any, rows: Sequence[Row], columns: Sequence[str], params: Params, section: Section
) -> TokenizedRows[Row]:
    """Tokenise prompts with their responses, within `max_length` of a section of params.yaml.

    Args:
        tokenizer: the tokenizer of the model folder.
        rows: with `prompt`.
        columns: names of the responses in a row, e.g. both sides of a pair.
        params: settings.
        section: its `max_length` and `overlong` apply. With `drop`, a row of which any response is
            too long is left out; with `close`, all its responses keep the same part of the prompt.

    Raises:
        BadInput: there are rows, but each is too long.
    """
    train: TrainParams = getattr(params, section)
    kept, prompts, overlong = list[Row](), list[TokenIds](), 0
    responses: dict[str, list[TokenIds]] = {column: [] for column in columns}
    for row in tracked("counting tokens", rows, len(rows)):
        encoded = [
            encode(tokenizer, row["prompt"], row[column], params.prepare.prompt_format)
            for column in columns
        ]
        prompt, texts = encoded[0][0], [response for _, response in encoded]
        if len(prompt) + max(map(len, texts)) > train.max_length:
            overlong += 1
            if train.overlong is Overlong.drop:
                continue
            prompt, texts = cut_to(tokenizer, train.max_length, prompt, texts)
        kept.append(row)
        prompts.append(prompt)
        for column, text in zip(columns, texts, strict=True):
            responses[column].append(text)
    if rows and not kept:
        raise BadInput(
            f"all {len(rows)} rows are longer than {section}.max_length ({train.max_length} tokens "
            f"of prompt, response and EOS): raise it, or set {section}.overlong to close, which "
            "cuts the responses"
        )
    return TokenizedRows(kept, prompts, responses, overlong)


def report_overlong(label: str, overlong: int, rows: int, section: Section, params: Params) -> None:
    """Print how many of the rows were longer than max_length, if any were."""
    train = cast(TrainParams, getattr(params, section))
    if overlong:
        done = "left out" if train.overlong is Overlong.drop else "cut and closed with EOS"
        print(
            f"[{label}] {overlong} of {rows} texts are longer than {section}.max_length "
            f"({train.max_length} tokens): {done} ({section}.overlong)",
            flush=True,
        )


def check_lengths(params: Params) -> None:
    """Check that SFT and reward model are trained on texts as long as those of the policy."""
    prompt, response = params.prepare.max_prompt_tokens, params.ppo.response_length
    needed = prompt + response + 1
    for section in ("sft", "reward"):
        train: TrainParams = getattr(params, section)
        if train.max_length < needed:
            raise BadInput(
                f"{section}.max_length is {train.max_length}, but prepare.max_prompt_tokens "
                f"({prompt}) + ppo.response_length ({response}) + EOS are {needed}: the policy's "
                f"texts could be longer than any that this stage is trained on. Set "
                f"{section}.max_length to at least {needed}, or lower one of the others"
            )
