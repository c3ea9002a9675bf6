"""The replay stage, top to bottom."""

import random
from pathlib import Path

from stages.errors import BadInput
from stages.judges import Fluency, judge
from stages.models import prepare_torch
from stages.params import Params
from stages.prepare.split import prompt_key
from stages.program import run_stage
from stages.prompts import check_template, encode, template_hash
from stages.records import Recorder, Row, file_hash, read_jsonl, stage_dir, write_jsonl, write_manifest
from stages.replay.exploits import Exploit, candidates, exploit_pairs, find_exploits, fooled_share
from stages.replay.mine import CAUSES, Limits, Sample, kl_limit, mine
from stages.replay.repair import Answer, best_answer, capped, fluent_nll, repair
from stages.replay.retry import repaired_by_cause, try_again
from stages.replay.sampling import Draw, Sampler, Scorer

FRESH_PROMPTS = 96
HELD_OUT_PAIRS = 128
ENDING_TOKENS = 16  # room for an ending, so that max_length does not cut it off again


def main(params: Params, round_: str) -> None:
    # 1. inputs: training prompts only, for what is drawn here is trained on
    prepare_torch(params)
    folder, data = stage_dir(round_, "replay"), stage_dir(round_, "prepare") / "data"
    made_by, previous = f"dvc repro prepare@{round_}", Path(params.rounds[round_].previous)
    recorder = Recorder("replay", round_, 6)
    prompts = once(read_jsonl(data / "prompts_train.jsonl", made_by))
    human_sft = [row for row in read_jsonl(data / "sft_train.jsonl", made_by) if "badcase" not in row]
    rollouts = late(read_jsonl(stage_dir(round_, "ppo") / "rollouts.jsonl", f"dvc repro ppo@{round_}"))
    refuse_evaluation_prompts([*prompts, *rollouts], read_jsonl(data / "eval_prompts.jsonl", made_by))
    sampler = Sampler(params, round_)
    for stage in ("sft", "reward", "ppo"):
        check_template(stage_dir(round_, stage) / "manifest.json", sampler.tokenizer, params.prepare.prompt_format)
    train, held_out = (short(read_jsonl(data / f"pairs_{part}.jsonl", made_by), sampler, params) for part in ("train", "eval"))
    human, held_out = [row for row in train if "badcase" not in row], shuffled(held_out, params.seed)[:HELD_OUT_PAIRS]

    # 2. what the policy says: late rollouts, and fresh samples beside SFT's
    asked = shuffled(prompts, params.seed)[:FRESH_PROMPTS]
    texts = [row["prompt"] for row in asked]
    recorder.say(1, f"{len(asked)} fresh samples of policy and SFT")
    sft = sampler.sft(texts, params.seed)
    samples = from_rollouts(rollouts) + from_draws(asked, sampler.policy(texts, params.seed), sft)

    # 3. exploits: what the policy ends with, SFT does not, and the reward model overpays
    shares = candidates([s.response for s in samples], [d.text for d in sft], params.replay.exploit_share, params.replay.exploit_lift)
    recorder.say(2, f"{len(shares)} endings that the policy likes, tried on the reward model")
    exploits = find_exploits(shares, shuffled(human, params.seed), sampler.scorer)
    suffixes = [exploit.suffix for exploit in exploits]

    # 4. badcases by cause
    limits = Limits(params.replay, suffixes, kl_limit([s.kl for s in samples], params.replay.kl_outlier), params.evaluate.tie_margin)
    badcases = mine(samples, limits, {"round": round_, "policy": file_hash(stage_dir(round_, "ppo") / "policy")})
    recorder.say(3, f"{len(badcases)} badcases, exploits {suffixes}")

    # 5. better answers, and the next round's rows
    best = better_answers(badcases, sampler, params, suffixes)
    pairs, demonstrations, again = repair(badcases, best, params.evaluate.tie_margin)
    against = exploit_pairs(exploits, human, params.replay.pairs_per_exploit, params.seed)
    rows = {
        "pairs": capped([*against, *pairs], len(human), params.replay.max_share),
        "sft": capped(demonstrations, len(human_sft), params.replay.max_share),
        "prompts": capped(again, len(prompts), params.replay.max_share),
    }
    recorder.say(4, "next round gets " + ", ".join(f"{len(made)} {name}" for name, made in rows.items()))

    # 6. the round before: its badcases tried again, its exploits under both reward models
    tried, fooled = last_round(previous, sampler, params, limits, held_out)
    fooled["fooled_now"] = fooled_share(suffixes, held_out, sampler.scorer)

    # 7. write
    for name, made in {**rows, "badcases": [*tried, *badcases], "exploits": [row_of(exploit) for exploit in exploits]}.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", made)
    write_manifest(
        folder,
        stage="replay",
        round_=round_,
        seed=params.seed,
        inputs=[data, stage_dir(round_, "ppo") / "rollouts.jsonl", stage_dir(round_, "ppo") / "policy"],
        template_hash=template_hash(sampler.tokenizer, params.prepare.prompt_format),
        kl_limit=limits.kl,
    )
    repaired = repaired_by_cause(tried)
    recorder.finish(
        {
            "badcases": len(badcases),
            "causes": {cause: sum(row["cause"] == cause for row in badcases) for cause in CAUSES},
            "exploits": suffixes,
            "tried_again": len(tried),
            "repaired": sum(repaired.values()),
            "repaired_by_cause": repaired,
            **fooled,
            "pairs": len(rows["pairs"]),
            "demonstrations": len(rows["sft"]),
            "prompts": len(rows["prompts"]),
        }
    )
    print(
        f"[replay@{round_}] {len(badcases)} badcases, {sum(repaired.values())} of {len(tried)} earlier ones repaired, {fooled}", flush=True
    )


def once(rows: list[Row]) -> list[Row]:
    """The rows of distinct prompts: replayed prompts are there twice."""
    return list({str(row["prompt"]): row for row in reversed(rows)}.values())


def late(rollouts: list[Row]) -> list[Row]:
    """The last third of the updates: what the policy has become."""
    last = max((row["update"] for row in rollouts), default=0)
    return [row for row in rollouts if row["update"] > 2 / 3 * last]


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    return random.Random(seed).sample(rows, len(rows))


def refuse_evaluation_prompts(rows: list[Row], evaluation: list[Row]) -> None:
    """
    Raises:
        BadInput: a prompt to be mined is in the frozen evaluation set.
    """
    frozen = {prompt_key(row["prompt"]): row["id"] for row in evaluation}
    for row in rows:
        if hit := frozen.get(prompt_key(row["prompt"])):
            raise BadInput(
                f"training prompt {row['id']} is evaluation prompt {hit}, which no round may train on; run `dvc repro prepare` again"
            )


def short(pairs: list[Row], sampler: Sampler, params: Params) -> list[Row]:
    """Pairs that stay within reward.max_length with an ending appended."""

    def tokens(row: Row, side: str) -> int:
        prompt, response = encode(sampler.tokenizer, row["prompt"], row[side], params.prepare.prompt_format)
        return len(prompt) + len(response)

    return [row for row in pairs if max(tokens(row, "chosen"), tokens(row, "rejected")) + ENDING_TOKENS <= params.reward.max_length]


def from_rollouts(rows: list[Row]) -> list[Sample]:
    judged = judge([row["prompt"] for row in rows], [row["response"] for row in rows])
    return [
        Sample(r["id"], r["prompt"], r["response"], r["score"], r["kl"], r["eos"], said, r["update"])
        for r, said in zip(rows, judged, strict=True)
    ]


def from_draws(asked: list[Row], policy: list[Draw], sft: list[Draw]) -> list[Sample]:
    prompts = [row["prompt"] for row in asked]
    judged, rivals = (judge(prompts, [draw.text for draw in draws]) for draws in (policy, sft))
    return [
        Sample(row["id"], row["prompt"], ours.text, ours.score, ours.kl, ours.ended, said, "fresh", theirs.text, rival)
        for row, ours, said, theirs, rival in zip(asked, policy, judged, sft, rivals, strict=True)
    ]


def better_answers(badcases: list[Row], sampler: Sampler, params: Params, avoid: list[str]) -> dict[str, Answer]:
    """For each badcase id the judges' best of replay.best_of SFT responses to its prompt, where one is sound."""
    prompts = list({str(case["prompt"]): case["prompt"] for case in badcases}.values())
    asked = [prompt for prompt in prompts for _ in range(params.replay.best_of)]
    if not asked:
        return {}
    draws = sampler.sft(asked, params.seed + 1)
    with sampler.model.disable_adapter():
        nll = Fluency(sampler.model, sampler.tokenizer, params.prepare.prompt_format)(asked, [draw.text for draw in draws])
    judged = judge(asked, [draw.text for draw in draws])
    answers: dict[str, list[Answer]] = {}
    for prompt, draw, said, value in zip(asked, draws, judged, nll, strict=True):
        if draw.ended:
            answers.setdefault(str(prompt), []).append(Answer(draw.text, said, value))
    most = fluent_nll([answer for each in answers.values() for answer in each])
    best = {case["id"]: best_answer(answers.get(str(case["prompt"]), []), avoid, params.replay.repetition, most) for case in badcases}
    return {case: answer for case, answer in best.items() if answer}


def last_round(
    previous: Path, sampler: Sampler, params: Params, limits: Limits, held_out: list[Row]
) -> tuple[list[Row], dict[str, float | None]]:
    """Earlier badcases with their new state, and how far the earlier exploits fool the reward model before and now."""
    if (previous / "replay/data/EMPTY").exists():
        return [], {"fooled_before": None, "fooled_after": None}
    made_by = f"dvc repro replay@{previous.name}"
    badcases, exploits = (read_jsonl(previous / f"replay/data/{name}.jsonl", made_by) for name in ("badcases", "exploits"))
    prompts, better = [row["prompt"] for row in badcases], [row["better"] or "" for row in badcases]
    tried: list[Row] = []
    if badcases:
        draws = sampler.policy(prompts, params.seed + 2)
        high, low = (sampler.scorer(prompts, side) for side in (better, [row["response"] for row in badcases]))
        tried = try_again(badcases, draws, high, low, limits)
    suffixes = [row["suffix"] for row in exploits]
    before = Scorer(previous / "reward/model", sampler.tokenizer, params)
    return tried, {
        "fooled_before": fooled_share(suffixes, held_out, before),
        "fooled_after": fooled_share(suffixes, held_out, sampler.scorer),
    }


def row_of(exploit: Exploit) -> Row:
    shares = {name: round(getattr(exploit, name), 4) for name in ("policy_share", "sft_share", "uplift")}
    return {"id": exploit.id, "suffix": exploit.suffix, **shares}


if __name__ == "__main__":
    run_stage("replay", main)
