"""The replay stage, top to bottom."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.lib.core.files import (
    ASSETS,
    file_hash,
    is_placeholder,
    read_jsonl,
    stage_dir,
    write_jsonl,
)
from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row, ScoreFunction
from stages.lib.data.prompts import check_template, pairs_with_room_for_ending, template_hash
from stages.lib.data.rollouts import read_rollouts
from stages.lib.data.splits import HELD_OUT, dedupe_prompts, refuse_evaluation_prompts, shuffled
from stages.lib.dedup.contamination import leaks_by_set
from stages.lib.judging.jury import Jury, load_jury
from stages.lib.judging.lexicon import lexicon_scores
from stages.lib.judging.pairwise import Comparison
from stages.lib.lm.loading import load_causal_lm, setup_torch
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.stats import paired_bootstrap
from stages.replay.badcases import Badcase, Cause, State, read_ledger
from stages.replay.better_answers import better_answers
from stages.replay.exploits import (
    Exploit,
    candidates,
    exploit_pairs,
    find_exploits,
    pairs_flipped,
    strip_exploits,
)
from stages.replay.mining import BadcaseThresholds, PolicySample, find_badcases, kl_limit, reported
from stages.replay.retest import by_cause, comparison_response, retest
from stages.replay.sampler import BATCH, Sampler, ScoredResponse, draw
from stages.replay.training_rows import cap_share, make_training_rows
from stages.replay.user_reports import read_user_reports

FRESH_PROMPTS = 96
HELD_OUT_PAIRS = 512  # at most


def main(params: Params, round_: str) -> None:
    # 1. inputs: no evaluation prompt, for what is drawn here is trained on
    setup_torch(params)
    folder, data = stage_dir(round_, "replay"), stage_dir(round_, "prepare") / "data"
    made_by, previous = f"dvc repro prepare@{round_}", Path(params.rounds[round_].previous)
    recorder = MetricLogger("replay", round_, 6)
    prompts = dedupe_prompts(read_jsonl(data / "prompts_train.jsonl", made_by))
    human_sft = [
        row for row in read_jsonl(data / "sft_train.jsonl", made_by) if "badcase" not in row
    ]
    rollouts = last_third(
        read_rollouts(stage_dir(round_, "ppo") / "rollouts", f"dvc repro ppo@{round_}")
    )
    evaluation = {name: read_jsonl(data / f"{name}.jsonl", made_by) for name in HELD_OUT.values()}
    refuse_evaluation_prompts([*prompts, *rollouts], evaluation["eval_prompts"])
    reports, wanted = read_user_reports(round_, evaluation["eval_prompts"])
    sampler = Sampler(params, round_)
    for stage in ("sft", "reward", "ppo"):
        check_template(
            stage_dir(round_, stage) / "manifest.json",
            sampler.tokenizer,
            params.prepare.prompt_format,
        )
    train, held_out = (
        pairs_with_room_for_ending(
            read_jsonl(data / f"pairs_{part}.jsonl", made_by), sampler.tokenizer, params
        )
        for part in ("train", "eval")
    )
    human, held_out = (
        [row for row in train if "badcase" not in row],
        shuffled(held_out, params.seed)[:HELD_OUT_PAIRS],
    )

    # 2. what the policy says: late rollouts, and fresh samples beside SFT's
    asked = [*shuffled(prompts, params.seed)[:FRESH_PROMPTS], *wanted]
    texts = [row["prompt"] for row in asked]
    recorder.log_progress(1, f"{len(asked)} fresh samples of policy and SFT")
    sft = sampler.sft(texts, params.seed)
    jury = load_jury(
        params,
        round_,
        load_causal_lm(ASSETS / "model", params.model),
        sampler.tokenizer,
        evaluation["sft_eval"],
    )
    samples = from_rollouts(rollouts) + from_draws(
        asked, sampler.policy(texts, params.seed), [each.text for each in sft], "fresh", jury
    )

    # 3. exploits: what the policy ends with, SFT does not, and the reward model overpays
    shares = candidates(
        [s.response for s in samples],
        [d.text for d in sft],
        params.replay.exploit_share,
        params.replay.exploit_lift,
    )
    recorder.log_progress(
        2, f"{len(shares)} endings that the policy likes, tried on the reward model"
    )
    exploits = find_exploits(shares, shuffled(human, params.seed), sampler.scorer)
    suffixes = [exploit.suffix for exploit in exploits]

    # 4. badcases by cause, as far as no earlier round knows them; what people have reported is
    # added to them
    earlier = read_ledger(previous.name) if not is_placeholder(previous / "replay/data") else []
    samples = score_without_exploits(samples, [suffixes] * len(samples), sampler.scorer)
    limits = BadcaseThresholds(
        params.replay,
        kl_limit([s.kl for s in samples], params.replay.kl_outlier),
        JudgeName.lexicon.value in params.evaluate.judges,
    )
    policy, known = file_hash(stage_dir(round_, "ppo") / "policy"), {case.id for case in earlier}
    mined = find_badcases(samples, limits, round_, policy, known)
    scores = sampler.scorer(
        [report.prompt for report in reports], [report.response for report in reports]
    )
    badcases = [
        *(case for case in reported(reports, scores, round_) if case.id not in known),
        *mined,
    ]
    recorder.log_progress(
        3, f"{len(badcases)} badcases, {len(reports)} of them reported, exploits {suffixes}"
    )

    # 5. better answers, and the next round's rows; what of the badcases is chance
    drawn = draw([case.prompt for case in badcases if case.better is None], sampler, params)
    better = better_answers(badcases, drawn, jury, params.replay, suffixes, limits.lexicon)
    badcases, pairs, demonstrations, again = make_training_rows(badcases, better)
    badcases = resample_and_retest(badcases, sampler, jury, params.seed + 3, limits, round_)
    against = exploit_pairs(exploits, human, params.replay.pairs_per_exploit, params.seed)
    made, leaked = clean(
        {"pairs": [*against, *pairs], "sft": demonstrations, "prompts": again},
        evaluation,
        params.prepare.near_duplicate,
    )
    own = {"pairs": len(human), "sft": len(human_sft), "prompts": len(prompts)}
    rows = {
        name: cap_share(some * params.replay.weight, own[name], params.replay.max_share)
        for name, some in made.items()
    }
    recorder.log_progress(
        4,
        "next round gets "
        + ", ".join(f"{len(some)} {name}" for name, some in rows.items())
        + f"; {leaked} leaked",
    )

    # 6. the round before: its badcases tried again, its exploits under both reward models
    chosen = chosen_scores(stage_dir(round_, "reward"))
    tried = resample_and_retest(earlier, sampler, jury, params.seed + 2, limits, round_)
    progress = repair_metrics(earlier, tried) | blind_spots(
        previous, sampler, params, held_out, chosen
    )
    progress["fooled_now"] = share(pairs_flipped(suffixes, held_out, sampler.scorer, chosen))

    # 7. write
    ledger = [case.model_dump(mode="json") for case in [*tried, *badcases]]
    for name, some in {
        **rows,
        "badcases": ledger,
        "exploits": [row_of(exploit) for exploit in exploits],
    }.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", some)
    write_manifest(
        folder,
        stage="replay",
        round_=round_,
        seed=params.seed,
        inputs=[data, stage_dir(round_, "ppo") / "rollouts", stage_dir(round_, "ppo") / "policy"],
        template_hash=template_hash(sampler.tokenizer, params.prepare.prompt_format),
        kl_limit=limits.kl,
    )
    causes = {cause.value: sum(case.cause is cause for case in badcases) for cause in Cause}
    counts = {
        "pairs": len(rows["pairs"]),
        "demonstrations": len(rows["sft"]),
        "prompts": len(rows["prompts"]),
    }
    recorder.finish(
        {
            "badcases": len(badcases),
            "causes": causes,
            "exploits": suffixes,
            **progress,
            "leaked": leaked,
            **counts,
            "jury": jury.report(),
        }
    )
    print(
        f"[replay@{round_}] {len(badcases)} badcases; "
        + "  ".join(f"{name} {value}" for name, value in progress.items()),
        flush=True,
    )


def last_third(rollouts: list[Row]) -> list[Row]:
    """The last third of the updates: what the policy has become."""
    last = max((row["update"] for row in rollouts), default=0)
    return [row for row in rollouts if row["update"] > 2 / 3 * last]


def clean(
    made: dict[str, list[Row]], evaluation: dict[str, list[Row]], similarity: float
) -> tuple[dict[str, list[Row]], int]:
    """The rows made of which nothing is in an evaluation text, so that the next round's prepare
    will take them; how many are left out.
    """
    held_out = [row for rows in evaluation.values() for row in rows]
    leaks = {
        name: {leak.row for leak in some}
        for name, some in leaks_by_set(made, held_out, similarity).items()
    }
    kept = {
        name: [row for index, row in enumerate(rows) if index not in leaks[name]]
        for name, rows in made.items()
    }
    return kept, sum(map(len, leaks.values()))


def from_rollouts(rows: list[Row]) -> list[PolicySample]:
    judged = lexicon_scores([row["prompt"] for row in rows], [row["response"] for row in rows])
    return [
        PolicySample(
            r["id"],
            r["prompt"],
            r["response"],
            r["score"],
            r["kl"],
            r["finish_reason"] == "stop",
            said,
            r["update"],
        )
        for r, said in zip(rows, judged, strict=True)
    ]


def from_draws(
    asked: list[Row],
    policy: list[ScoredResponse],
    rivals: Sequence[str | None],
    origin: str,
    jury: Jury,
) -> list[PolicySample]:
    """Samples with the jury's votes against their rivals, where they have one."""
    judged = lexicon_scores([row["prompt"] for row in asked], [each.text for each in policy])
    compared = [place for place, rival in enumerate(rivals) if rival is not None]
    told = jury.compare(
        [
            Comparison(asked[place]["prompt"], policy[place].text, rivals[place] or "")
            for place in compared
        ]
    )
    votes = {
        place: {name: each[number] for name, each in told.items()}
        for number, place in enumerate(compared)
    }
    return [
        PolicySample(
            row["id"],
            row["prompt"],
            ours.text,
            ours.score,
            ours.kl,
            ours.ended,
            said,
            origin,
            rivals[place],
            votes.get(place, {}),
        )
        for place, (row, ours, said) in enumerate(zip(asked, policy, judged, strict=True))
    ]


def score_without_exploits(
    samples: list[PolicySample], exploits: Sequence[list[str]], score: ScoreFunction
) -> list[PolicySample]:
    """The samples with those of their list of exploits that they carry, and their score without
    them.
    """
    carried = [
        tuple(e for e in some if e in sample.response)
        for sample, some in zip(samples, exploits, strict=True)
    ]
    asked = [number for number, found in enumerate(carried) if found]
    texts = [strip_exploits(carried[number], samples[number].response) for number in asked]
    bare = dict(zip(asked, score([samples[number].prompt for number in asked], texts), strict=True))
    return [
        replace(sample, exploits=carried[number], bare=bare.get(number))
        for number, sample in enumerate(samples)
    ]


def resample_and_retest(
    badcases: list[Badcase],
    sampler: Sampler,
    jury: Jury,
    seed: int,
    limits: BadcaseThresholds,
    round_: str,
) -> list[Badcase]:
    """The badcases with a try by this round's policy (replay.tries new responses each) and reward
    model.
    """
    if not badcases:
        return []
    each = [case for case in badcases for _ in range(limits.replay.tries)]
    asked = [{"id": case.prompt_id, "prompt": case.prompt} for case in each]
    draws = sampler.policy([case.prompt for case in each], seed)
    answers = from_draws(asked, draws, [comparison_response(case) for case in each], "again", jury)
    answers = score_without_exploits(answers, [case.exploits for case in each], sampler.scorer)
    paired = [case for case in badcases if case.better is not None]
    better, bad = (
        sampler.scorer([case.prompt for case in paired], side)
        for side in ([case.better or "" for case in paired], [case.response for case in paired])
    )
    wrong = {
        case.id for case, good, worse in zip(paired, better, bad, strict=True) if good <= worse
    }
    tries = limits.replay.tries
    by_case = [answers[place : place + tries] for place in range(0, len(answers), tries)]
    return retest(badcases, by_case, [case.id not in wrong for case in badcases], limits, round_)


def repair_metrics(before: list[Badcase], tried: list[Badcase]) -> dict[str, Any]:
    """What this round has made of the badcases of all rounds before. guarded: repaired before, so
    that they must not come back.
    """
    guarded = [now for then, now in zip(before, tried, strict=True) if then.guarded]
    others = [now for then, now in zip(before, tried, strict=True) if not then.guarded]
    return {
        "tried_again": len(others),
        "repaired": sum(case.state is State.repaired for case in others),
        "repaired_by_cause": by_cause(others, State.repaired),
        "repaired_by_chance": sum(case.by_chance for case in others),
        "guarded": len(guarded),
        "regressed": sum(case.state is State.regressed for case in guarded),
    }


def chosen_scores(reward: Path) -> dict[str, float]:
    """What a reward stage has found: calibrated scores of the held-out pairs' chosen texts, by the
    pairs' ids.
    """
    return {
        row["id"]: row["chosen"]
        for row in read_jsonl(reward / "scores.jsonl", f"dvc repro reward@{reward.parent.name}")
    }


def blind_spots(
    previous: Path, sampler: Sampler, params: Params, held_out: list[Row], chosen: dict[str, float]
) -> dict[str, float | None]:
    """How far the exploits of the round before fool its reward model and this one."""
    suffixes: list[str] = []
    before, after = [], []
    if not is_placeholder(previous / "replay/data"):
        suffixes = [
            row["suffix"]
            for row in read_jsonl(
                previous / "replay/data/exploits.jsonl", f"dvc repro replay@{previous.name}"
            )
        ]
    if suffixes:
        earlier = RewardScorer(previous / "reward/model", sampler.tokenizer, params, BATCH)
        before = pairs_flipped(suffixes, held_out, earlier, chosen_scores(previous / "reward"))
        after = pairs_flipped(suffixes, held_out, sampler.scorer, chosen)
    falls = [[float(b) - a] for b, a in zip(before, after, strict=True)]
    fall, low, high = (
        paired_bootstrap(falls, params.evaluate.bootstrap_resamples, params.seed)
        if falls
        else (None, None, None)
    )
    return {
        "fooled_before": share(before),
        "fooled_after": share(after),
        "fooled_fall": fall,
        "fooled_fall_low": low,
        "fooled_fall_high": high,
    }


def share(outcomes: list[bool]) -> float | None:
    return sum(outcomes) / len(outcomes) if outcomes else None


def row_of(exploit: Exploit) -> Row:
    shares = {
        name: round(getattr(exploit, name), 4) for name in ("policy_share", "sft_share", "uplift")
    }
    return {"id": exploit.id, "suffix": exploit.suffix, **shares}


if __name__ == "__main__":
    stage_main("replay", main)
