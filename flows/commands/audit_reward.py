"""`rondo audit-reward`: the lines of the reward model's gate for any reward model or judge."""

import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from flows.audit import verdict
from flows.audit.inputs import params_for, read_pairs
from flows.audit.measure import Audit, that_fit
from flows.audit.subjects import find_subject
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.hub import model_folder
from stages.lib.core.params.data import SourceParams
from stages.lib.core.progress import reporting
from stages.lib.lm.loading import setup_torch


def audit_reward(
    named: str,
    source: SourceParams,
    *,
    slices: str | None,
    judge: str | None,
    policy: str | None,
    settings: Iterable[str],
    max_minutes: float,
    out: Path,
) -> int:
    """Audit what `named` names on the pairs of `source`; see the command's help.

    Returns:
        The exit code: 3 if a line fails, else 0.

    Raises:
        BadInput: there is no such model, pair file or policy; or an option is wrong.
    """
    if max_minutes <= 0:
        raise BadInput(f"--max-minutes {max_minutes:g}: expected more than 0")
    with reporting("audit"):
        pairs = read_pairs(source, slices)
        params = params_for(settings, pairs.are_conversations)
        setup_torch(params)
        subject = find_subject(named, params)
        second = find_subject(judge, params) if judge else None
        started, answers = time.perf_counter(), out / "answers"
        answering = subject.judge(answers)
        rows = that_fit(pairs.rows, answering, params, max_minutes * 60)
        audit = Audit(subject, answering, second.judge(answers) if second else None, params)
        metrics, shown = audit.measure(rows, model_folder(policy, "--policy") if policy else None)
    lines = verdict.lines_of(metrics, subject, params)
    facts = {
        "audited": f"{named} ({subject.kind})",
        "identity": subject.identity,
        "pairs": f"{len(rows)} of {source.path}; {len(pairs.unusable)} rows cannot be used",
        "prompts": f"as {params.prepare.prompt_format.value} text",
        "second judge": judge or "none",
        "policy": policy or "none",
        "date, seconds": f"{date.today()}, {time.perf_counter() - started:.0f}",
    }
    verdict.write(out, lines, facts, metrics, shown)
    print(verdict.text(lines))
    print(f"{named}: {verdict.headline(lines)}")
    print(f"written: {out}/audit.html for a browser, audit.md for a model card, audit.json")
    failed = any(line.outcome == verdict.FAILED for line in lines)
    return GateFailed.exit_code if failed else 0
