"""Labels by a judge: SFT responses to training prompts, each compared with each; and the judge
measured against people.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.annotate.ranking import all_pairs, best_and_worst, copeland
from stages.lib.core.errors import RondoError
from stages.lib.core.files import read_jsonl, stage_dir, work_dir, write_json, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import check_template, encode, template_hash
from stages.lib.data.splits import dedupe_prompts, refuse_evaluation_prompts, shuffled
from stages.lib.judging.agreement import between_orders, human_agreement
from stages.lib.judging.endpoint import EndpointJudge
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import (
    Comparison,
    PairwiseJudge,
    TwoOrderVerdict,
    judge_both_orders,
)
from stages.lib.lm.generation import generate
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch

BATCH = 128  # responses generated at once
JUDGED = 16  # prompts whose responses are compared between two lines of progress


@dataclass(frozen=True)
class LabelledPrompt:
    """A prompt's pair, None where the judge tells no two responses apart; and what it said of each
    two.
    """

    pair: Row | None
    judgements: list[TwoOrderVerdict]


def label_with_judge(params: Params, round_: str) -> None:
    # 1. inputs: training prompts only, for what is drawn here is trained on; people's held-out
    # pairs only measure
    setup_torch(params)
    folder, data, made_by = (
        stage_dir(round_, "annotate"),
        stage_dir(round_, "prepare") / "data",
        f"dvc repro prepare@{round_}",
    )
    prompts = shuffled(
        dedupe_prompts(read_jsonl(data / "prompts_train.jsonl", made_by)), params.seed
    )[: params.annotate.prompts]
    refuse_evaluation_prompts(prompts, read_jsonl(data / "eval_prompts.jsonl", made_by))
    replayed = [row for row in read_jsonl(data / "pairs_train.jsonl", made_by) if "badcase" in row]
    people = shuffled(read_jsonl(data / "pairs_eval.jsonl", made_by), params.seed)[
        : params.annotate.agreement_pairs
    ]
    recorder, judge = MetricLogger("annotate", round_, len(prompts)), load_judge(params)

    # 2. the judge against people, first: what is said here tells early whether its labels are worth
    # their price
    against_people = judge_both_orders(
        judge, [Comparison(row["prompt"], row["chosen"], row["rejected"]) for row in people]
    )
    agreement = human_agreement(against_people)
    recorder.log_progress(
        0,
        f"agrees with people on {agreement['rate'] or 0:.2f} of {agreement['pairs']} pairs; {agreement['ties']} ties",
    )

    # 3. responses of SFT
    tokenizer = load_tokenizer(stage_dir(round_, "sft") / "model")
    check_template(
        stage_dir(round_, "sft") / "manifest.json", tokenizer, params.prepare.prompt_format
    )
    responses = sample_responses([row["prompt"] for row in prompts], tokenizer, params, round_)

    # 4. the judge compares them; the best and the worst become a pair
    done: list[LabelledPrompt] = []
    for start in range(0, len(prompts), JUDGED):
        done += compare_all(
            judge, prompts[start : start + JUDGED], responses[start : start + JUDGED]
        )
        recorder.log_progress(len(done), f"{sum(each.pair is not None for each in done)} pairs")
    pairs = [each.pair for each in done if each.pair]
    judgements = [judgement for each in done for judgement in each.judgements]
    measured = between_orders([*against_people, *judgements])
    unparsable = sum(not each.readable for each in judgements)
    if not pairs:
        raise RondoError(
            f"annotate: the judge tells no two of {params.annotate.samples} responses apart, for any of {len(prompts)} prompts (of its "
            f"{len(judgements)} comparisons {unparsable} cannot be read; both orders agree in {measured['position_consistency']} of the "
            "others): look at annotate.endpoint.rubric and model, or raise annotate.temperature for responses that differ more"
        )

    # 5. write: replayed pairs stay, human ones do not
    write_jsonl(folder / "data/pairs_train.jsonl", [*pairs, *replayed])
    write_manifest(
        folder,
        stage="annotate",
        round_=round_,
        seed=params.seed,
        inputs=[data / f"{name}.jsonl" for name in ("prompts_train", "pairs_train", "pairs_eval")],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        **judge.describe(),
    )
    if usage := judge.usage():
        write_json(work_dir(round_, "annotate") / "usage.json", usage)
        print(
            f"[annotate@{round_}] " + "  ".join(f"{name} {value}" for name, value in usage.items()),
            flush=True,
        )
    recorder.finish(
        {
            "annotator": "judge",
            **judge.describe(),
            "prompts": len(prompts),
            "pairs": len(pairs),
            "ties": len(prompts) - len(pairs),
            "replayed": len(replayed),
            "comparisons": len(judgements),
            "unparsable": unparsable,
            **measured,
            "human_agreement": agreement,
            **judge.cost(),
        }
    )
    print(
        f"[annotate@{round_}] {len(pairs)} pairs of {len(prompts)} prompts, {len(replayed)} replayed",
        flush=True,
    )


def sample_responses(
    prompts: Sequence[Prompt], tokenizer: Any, params: Params, round_: str
) -> list[list[str]]:
    """annotate.samples SFT responses to each prompt."""
    ids = [encode(tokenizer, prompt, None, params.prepare.prompt_format)[0] for prompt in prompts]
    drawn = generate(
        load_causal_lm(stage_dir(round_, "sft") / "model", params.model),
        [each for each in ids for _ in range(params.annotate.samples)],
        response_length=params.ppo.response_length,
        temperature=params.annotate.temperature,
        generator=torch.Generator().manual_seed(params.seed),
        batch_size=BATCH,
        eos_token_id=tokenizer.eos_token_id,
    )
    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    return [
        texts[start : start + params.annotate.samples]
        for start in range(0, len(texts), params.annotate.samples)
    ]


def compare_all(
    judge: PairwiseJudge, prompts: Sequence[Row], responses: Sequence[Sequence[str]]
) -> list[LabelledPrompt]:
    """Each prompt's distinct responses, each with each."""
    distinct = [list(dict.fromkeys(texts)) for texts in responses]
    asked = [
        Comparison(row["prompt"], texts[i], texts[j])
        for row, texts in zip(prompts, distinct, strict=True)
        for i, j in all_pairs(len(texts))
    ]
    told = iter(judge_both_orders(judge, asked))
    return [
        labelled(row, texts, [next(told) for _ in all_pairs(len(texts))], judge.describe())
        for row, texts in zip(prompts, distinct, strict=True)
    ]


def labelled(
    row: Row, responses: Sequence[str], judgements: list[TwoOrderVerdict], about: Row
) -> LabelledPrompt:
    """The pair of a prompt's responses, with where it comes from."""
    places = all_pairs(len(responses))
    table = {
        place: judgement.preference for place, judgement in zip(places, judgements, strict=True)
    }
    scores = copeland(len(responses), table)
    found = best_and_worst(scores, table)
    if not found:
        return LabelledPrompt(None, judgements)
    best, worst = found
    confidence = judgements[places.index((min(found), max(found)))].confidence
    pair = {
        "id": f"judge-{row['id']}",
        "prompt": row["prompt"],
        "chosen": responses[best],
        "rejected": responses[worst],
        "source": "judge",
        "annotator": {
            **about,
            "samples": list(responses),
            "scores": scores,
            "confidence": confidence,
        },
    }
    return LabelledPrompt(pair, judgements)


def load_judge(params: Params) -> PairwiseJudge:
    if params.annotate.judge is JudgeName.endpoint:
        return EndpointJudge(params.annotate.endpoint)
    return LexiconJudge(params.evaluate.tie_margin)
