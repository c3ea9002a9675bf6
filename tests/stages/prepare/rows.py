"""What becomes of a row that a test writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.lib.core.params.data import PrepareParams, SpeakerMarkers
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Row
from stages.prepare.sources import readings


def become(
    raws: Sequence[Any],
    prompt_format: PromptFormat = PromptFormat.plain,
    special_tokens: frozenset[str] = frozenset(),
    speaker_markers: SpeakerMarkers = SpeakerMarkers.drop,
    columns: Sequence[str] = (),
    names: Mapping[str, str] = {},
) -> list[Row]:
    """The normalised rows, without prepare.columns; the first Defect is raised."""
    config = PrepareParams(
        prompt_format=prompt_format, speaker_markers=speaker_markers, columns=list(columns)
    )
    rows = [(f"file:{line}", raw) for line, raw in enumerate(raws, 1)]
    parsed = list(readings(rows, names, config, special_tokens))
    for reading in parsed:
        if reading.defect:
            raise reading.defect
    return [
        {name: value for name, value in reading.row.items() if name != "columns"}
        for reading in parsed
    ]


def becomes(raw: Any, *options: Any, **named: Any) -> Row:
    """As `become`, of a row that becomes one."""
    (row,) = become([raw], *options, **named)
    return row
