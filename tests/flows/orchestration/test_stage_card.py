"""What Prefect's pages show of a stage: its verdict, samples and texts of models."""

import json
from pathlib import Path

import pytest

from flows.orchestration import stage_card
from stages.lib.core.files import write_text

ATTACK = "<img src=x onerror=alert(1)> [x](javascript:alert(1)) |"


def check(metric: str, value: float | None, passed: bool, advice: str) -> dict[str, object]:
    """One that passed and has advice is a warning."""
    return {
        "metric": metric,
        "value": value,
        "threshold": "<= 0.4",
        "passed": passed,
        "fault": "too much" if advice else "",
        "next_step": advice,
    }


def test_a_verdict_has_failed_checks_first_and_advice_for_these_and_warnings() -> None:
    checks = [
        check("sft.eos_rate", 0.1, True, ""),
        check("sft.repetition_3 - sft.x", 0.82351234567, False, "Raise sft.num_train_epochs."),
        check("evaluate.human_nll_rise", None, True, ""),
        check("battery.lineage_distance", 1.4, True, "Train it from SFT."),
    ]
    verdict = {"passed": False, "may_continue": True, "checks": checks, "approval": None}
    assert stage_card.gate_markdown(verdict).splitlines() == [
        "**failed; the run went on, since the gate only warns**",
        "",
        "| check | value | wanted |",
        "| --- | --- | --- |",
        "| ✗ sft.repetition_3 - sft.x | 0.824 | &lt;= 0.4 |",
        "| ✓ sft.eos_rate | 0.1 | &lt;= 0.4 |",
        "| ✓ evaluate.human_nll_rise | - | &lt;= 0.4 |",
        "| ! battery.lineage_distance | 1.4 | &lt;= 0.4 |",
        "",
        "",
        "**What to do**",
        "",
        "- sft.repetition_3 - sft.x: too much. Raise sft.num_train_epochs.",
        "- battery.lineage_distance: too much. Train it from SFT.",
    ]
    passed = {"passed": True, "may_continue": True, "checks": checks[:1], "approval": None}
    assert "What to do" not in stage_card.gate_markdown(passed)


def test_a_verdict_is_never_html_nor_a_link() -> None:
    approval = {"approved": True, "by": ATTACK, "reason": ATTACK}
    checks = [check(ATTACK, 1.0, False, ATTACK)]
    verdict = {"passed": False, "may_continue": True, "checks": checks, "approval": approval}
    markdown = stage_card.gate_markdown(verdict)
    assert markdown.count("onerror") == 5 and "<" not in markdown
    assert markdown.count("\\[x\\](javascript") == markdown.count("(javascript") == 5
    assert all(row.count(" | ") == 2 for row in markdown.splitlines() if row.startswith("| ✗"))


def test_samples_of_the_evaluation_stand_side_by_side_with_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "id": str(number),
            "sample": 0,
            "prompt": [{"role": "user", "content": "Hi\x1b ```"}],
            "base": "not shown",
            "sft": "word " * 100,
            "ppo": ATTACK,
            "sft_judge_score": 0.1234567,
            "ppo_judge_score": 0.1 * number,
        }
        for number in range(10)
    ]
    path = Path("rounds/r0/evaluate/samples.jsonl")
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    samples = stage_card.samples("evaluate", "r0")
    assert [list(row) for row in samples] == [["prompt", "SFT", "policy", "judge"]] * 8
    assert samples[0]["judge"] == "0.123 -> 0.9"  # the largest gain
    assert len(samples[0]["SFT"]) == 200 and samples[0]["SFT"].endswith("…")
    assert "Hi\N{REPLACEMENT CHARACTER} ```" in samples[0]["prompt"]
    block = stage_card.text_table(samples)
    first, *lines, last = block.splitlines()
    assert (first, last) == ("````text", "````")
    assert max(map(len, lines)) <= 74
    header = next(line.split() for line in lines if "prompt" in line)
    assert header == ["prompt", "SFT", "policy", "judge"]
    assert sum("0.123 -> " in line for line in lines) == 8
