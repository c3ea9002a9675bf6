"""The replay stage: turn this round's failures into the next round's training rows.

Reads prepare's data, annotate's revised responses, PPO's rollouts, the policy, the SFT and
reward models, what people reported (badcases/<round>.jsonl), and the previous round's replay.
Writes to rounds/<round>/replay/data: pairs.jsonl, sft.jsonl and prompts.jsonl for the next round's
prepare, new rows and those of earlier rounds; badcases.jsonl (the ledger of all rounds so far) and
exploits.jsonl; and metrics.json.

Run: `python -m stages.replay --round r0`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.lib.core.files import file_hash, is_placeholder, stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import PreferencePair, PromptRow
from stages.lib.core.stage import stage_main
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.data.splits import DataSets, shuffled
from stages.lib.judging.jury import Jury
from stages.lib.judging.loading import base_model, load_jury
from stages.lib.lm import world
from stages.lib.lm.loading import setup_torch
from stages.lib.lm.scoring import RewardScorer
from stages.replay.badcases import Badcase, Cause, Report, read_ledger
from stages.replay.exploits import Exploit, ending_candidates, exploit_pairs, find_exploits
from stages.replay.inputs import ReplayInputs, last_third, read_inputs
from stages.replay.mining import (
    BadcaseThresholds,
    PolicySample,
    badcase_thresholds,
    find_badcases,
    reported_badcases,
)
from stages.replay.retest import exploit_metrics, repair_metrics, resample_and_retest
from stages.replay.sampler import (
    Sampler,
    compared_samples,
    judged_by_lexicon,
    rollout_samples,
    sample_candidates,
    score_without_exploits,
)
from stages.replay.training_rows import (
    POLICY_PAIR,
    REVISED_SOURCE,
    add_earlier,
    better_answers,
    demonstrations_of,
    finished_responses,
    limit_rows,
    make_training_rows,
    policy_pairs,
)

FRESH_PROMPTS = 96


def main(params: Params, round_: str) -> None:
    # 1. inputs; they become training rows, so evaluation prompts are refused
    setup_torch(params)
    check_unchanged("judges", params)
    config, seed, previous = params.replay, params.seed, Path(params.rounds[round_].previous)
    recorder = MetricLogger("replay", round_, 6, writes=world.is_main())
    inputs, sampler = read_inputs(round_, config.best_of), Sampler(params, round_)
    tokenizer, scorer = sampler.tokenizer, sampler.scorer
    for stage in ("sft", "reward", "ppo"):
        manifest = stage_dir(round_, stage) / "manifest.json"
        check_template(manifest, tokenizer, params.prepare.prompt_format)
    human_pairs, held_out = inputs.pairs_with_room(tokenizer, params)

    # 2. policy samples: late rollouts, and fresh samples that the jury compares with SFT's
    jury = load_jury(params, round_, base_model(params))
    fresh, sft_texts = fresh_samples(inputs, sampler, jury, seed)
    recorder.log_progress(1, f"{len(fresh)} fresh samples of policy and SFT")
    late = rollout_samples(last_third(inputs.rollouts), jury, scorer is not None)
    samples = late + fresh

    # 3. exploits: endings frequent in the policy's texts, rare in SFT's, and overpaid
    policy_texts = [sample.response for sample in samples]
    shares = ending_candidates(policy_texts, sft_texts, config.exploit_share, config.exploit_lift)
    recorder.log_progress(2, f"{len(shares)} candidate endings, tried on the reward model")
    exploits = find_exploits(shares, shuffled(human_pairs, seed), scorer)
    suffixes = [exploit["suffix"] for exploit in exploits]

    # 4. badcases: those that people reported, and by cause those that no earlier round has
    earlier = read_ledger(previous.name) if not is_placeholder(previous / "replay/data") else []
    samples = score_without_exploits(samples, [suffixes] * len(samples), scorer)
    limits = badcase_thresholds(params, samples)
    reported = reported_samples(inputs.reports, scorer, jury, round_)
    badcases = collect_badcases(samples, reported, earlier, limits, round_)
    counts = f"{len(badcases)} badcases, {len(inputs.reports)} of them reported"
    recorder.log_progress(3, f"{counts}, exploits {suffixes}")

    # 5. better answers; how many badcases this round's own policy passes by chance; training rows
    unanswered = [case.prompt for case in badcases if case.better is None]
    candidates = sample_candidates(unanswered, sampler, params)
    better = better_answers(badcases, candidates, jury, config, suffixes, limits.lexicon)
    badcases, pairs, demonstrations, prompt_rows = make_training_rows(badcases, better)
    badcases = resample_and_retest(badcases, sampler, jury, seed + 3, limits, round_)
    against = exploit_pairs(exploits, human_pairs, config.pairs_per_exploit, seed)
    own = pairs_of_policy(inputs, sampler, jury, suffixes, params, round_)
    # the first rows stay if replay.max_share leaves no room for all
    made: DataSets = {
        "pairs": [*against, *pairs, *own],
        "sft": [*demonstrations, *demonstrations_of(inputs.revised, round_)],
        "prompts": prompt_rows,
    }
    training_rows, leaked = limit_rows(
        add_earlier(made, inputs.earlier), inputs.evaluation, inputs.human, params
    )
    sizes = ", ".join(f"{len(new)} {name}" for name, new in training_rows.items())
    recorder.log_progress(4, f"next round gets {sizes}; {leaked} leaked")

    # 6. earlier rounds: their badcases retested, the previous exploits under both reward models
    retested = resample_and_retest(earlier, sampler, jury, seed + 2, limits, round_)
    exploit_rates = exploit_metrics(params, round_, suffixes, sampler, held_out)
    progress = repair_metrics(earlier, retested) | exploit_rates

    # 7. write
    judges = jury.report()  # here, since all processes take part
    if not world.is_main():
        return
    cases = [*retested, *badcases]
    write_data(params, round_, training_rows, cases, exploits, tokenizer, limits.kl)
    metrics = {
        "badcases": len(badcases),
        "causes": {cause.value: sum(case.cause is cause for case in badcases) for cause in Cause},
        "exploits": suffixes,
        **progress,
        "leaked": leaked,
        **row_metrics(training_rows, made),
        "jury": judges,
    }
    recorder.finish(metrics)
    summary = "  ".join(f"{name} {value}" for name, value in progress.items())
    print(f"[replay@{round_}] {len(badcases)} badcases; {summary}", flush=True)


def row_metrics(rows: DataSets, made: DataSets) -> dict[str, int]:
    """Numbers of the next round's rows; `made`: those of this round. `revised`: if it has any."""
    made_pairs = {row["id"] for row in made["pairs"]}
    new_pairs = [row["id"] for row in rows["pairs"] if row["id"] in made_pairs]
    revised = {row["id"] for row in made["sft"] if row.get("source") == REVISED_SOURCE}
    counts = {
        "policy_pairs": sum(pair_id.startswith(POLICY_PAIR) for pair_id in new_pairs),
        "earlier_pairs": len(rows["pairs"]) - len(new_pairs),
        "pairs": len(rows["pairs"]),
        "demonstrations": len(rows["sft"]),
        "prompts": len(rows["prompts"]),
    }
    return counts | ({"revised": sum(r["id"] in revised for r in rows["sft"])} if revised else {})


def fresh_samples(
    inputs: ReplayInputs, sampler: Sampler, jury: Jury, seed: int
) -> tuple[list[PolicySample], list[str]]:
    """The policy's samples, compared with SFT's; and SFT's texts."""
    drawn = shuffled(inputs.prompts, seed)[:FRESH_PROMPTS]
    rows: list[PromptRow] = [*drawn, *inputs.mining_prompts]
    prompts = [row["prompt"] for row in rows]
    sft_texts = [response.text for response in sampler.sft(prompts, seed)]
    policy = sampler.policy(prompts, seed)
    return compared_samples(rows, policy, sft_texts, "fresh", jury), sft_texts


def reported_samples(
    reports: list[Report], scorer: RewardScorer | None, jury: Jury, round_: str
) -> list[Badcase]:
    """What people reported, with the reward model's scores if there is one."""
    prompts, responses = [row.prompt for row in reports], [row.response for row in reports]
    lexicon = judged_by_lexicon(jury, prompts, responses)
    scores = scorer(prompts, responses) if scorer else [None] * len(reports)
    return reported_badcases(reports, scores, lexicon, round_)


def collect_badcases(
    samples: list[PolicySample],
    reported: list[Badcase],
    earlier: list[Badcase],
    limits: BadcaseThresholds,
    round_: str,
) -> list[Badcase]:
    """The reported badcases, then the mined ones; without those of earlier rounds."""
    known = {case.id for case in earlier}
    policy_hash = file_hash(stage_dir(round_, "ppo") / "policy")
    mined = find_badcases(samples, limits, round_, policy_hash, known)
    return [*(case for case in reported if case.id not in known), *mined]


def pairs_of_policy(
    inputs: ReplayInputs,
    sampler: Sampler,
    jury: Jury,
    exploits: Sequence[str],
    params: Params,
    round_: str,
) -> list[PreferencePair]:
    """The jury's pairs of the policy's responses to replay.policy_pairs training prompts."""
    best_of = params.replay.best_of
    prompts = shuffled(inputs.prompts, params.seed)[: params.replay.policy_pairs]
    repeated = [row["prompt"] for row in prompts for _ in range(best_of)]
    sampled = sampler.policy_texts(repeated, params.seed + 4) if repeated else []
    fresh = [sampled[start : start + best_of] for start in range(0, len(sampled), best_of)]
    responses = finished_responses(prompts, fresh, inputs.rollouts)
    return policy_pairs(prompts, responses, exploits, jury, round_)


def write_data(
    params: Params,
    round_: str,
    training_rows: DataSets,
    ledger: Sequence[Badcase],
    exploits: Sequence[Exploit],
    tokenizer: Any,
    kl_limit: float,
) -> None:
    """Write the files of replay/data, and the manifest."""
    folder, ppo = stage_dir(round_, "replay"), stage_dir(round_, "ppo")
    files: Mapping[str, Sequence[Mapping[str, Any]]] = {
        **training_rows,
        "badcases": [case.model_dump(mode="json") for case in ledger],
        "exploits": [
            {name: round(x, 4) if isinstance(x, float) else x for name, x in exploit.items()}
            for exploit in exploits
        ],
    }
    for name, rows in files.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    write_manifest(
        "replay",
        round_,
        seed=params.seed,
        inputs=[stage_dir(round_, "prepare") / "data", ppo / "rollouts", ppo / "policy"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        kl_limit=kl_limit,
    )


if __name__ == "__main__":
    stage_main("replay", main)
