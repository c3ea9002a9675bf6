"""Overlap of the users' own training and held-out prompts."""

import pytest

from stages.lib.core.errors import BadInput
from stages.prepare.sources import check_no_prompt_overlap


def test_overlap_names_both_rows() -> None:
    held_out = [
        {"where": "e.jsonl:1", "prompt": "The sea"},
        {"where": "e.jsonl:2", "prompt": "The sky is"},
    ]
    check_no_prompt_overlap(held_out, [{"where": "t.jsonl:1", "prompt": "The seal"}])
    with pytest.raises(
        BadInput, match=r"(?s)1 training rows.*held-out e\.jsonl:2 and training t\.jsonl:4"
    ):
        check_no_prompt_overlap(held_out, [{"where": "t.jsonl:4", "prompt": "the sky is blue"}])
