"""Every number that a gate looks at: its band, why it has one, and what to do first when it is
outside.

A `metric` is a dotted name in the metrics.json of a stage, or the difference of two. `bound` is the
key of gates.<gate> in params.yaml. `python -m stages.gate.thresholds` prints the tables of
docs/gates.md.
"""

from typing import NamedTuple

from stages.lib.core.params.gates import GatesParams


class Threshold(NamedTuple):
    """compare: `within`: the absolute value is at most the bound. optional: null, which its stage
    wrote, is no failure.
    """

    metric: str
    compare: str
    bound: str
    why: str
    fix: str
    optional: bool = False


SFT = (
    Threshold(
        "sft.loss_before - sft.loss_after",
        ">=",
        "loss_drop",
        "Nats a token on held-out demonstrations, from the base model. 0.2 is a third of what 0.7 epochs bring on the default "
        "(0.6); less is noise of a few hundred texts, or a learning rate that does nothing.",
        "SFT learnt too little: look at rounds/{round}/sft/samples.jsonl and curves.csv, raise sft.num_train_epochs (in later "
        "rounds sft.continue_epochs) or sft.learning_rate, or add demonstrations",
    ),
    Threshold(
        "sft.judged_gain_low",
        ">=",
        "judged_gain",
        "Base and SFT answer the frozen prompts, sft.samples_per_prompt times with the same random numbers; the judge's gain, lower "
        "bound of its paired 95% interval over prompts. SFT need not please the judge, but must not be worse: by less than "
        "evaluate.tie_margin (0.05) two texts are alike.",
        "the judge may find SFT worse than the base model: read rounds/{round}/sft/samples.jsonl side by side; are the "
        "demonstrations (reports/{round}/data.html) what you want to read? If they are, and the judge is not of your task "
        "(stages/lib/judging/lexicon.py), lower this bound",
    ),
    Threshold(
        "sft.eos_rate_demonstrations - sft.eos_rate",
        "<=",
        "eos_gap",
        "Responses within ppo.response_length that end, against demonstrations that would. A model that does not end gives PPO "
        "cut-off texts, which the reward model never saw.",
        "responses do not end: PPO would learn on cut-off texts; check that demonstrations fit sft.max_length (a longer one "
        "loses its EOS), raise sft.num_train_epochs or ppo.response_length",
    ),
    Threshold(
        "sft.length_ratio",
        ">=",
        "length_low",
        "Mean tokens of responses over those of demonstrations, both up to ppo.response_length. Half is far outside of what "
        "sampling 88 texts does.",
        "responses are far shorter than the demonstrations: look for empty or cut demonstrations in reports/{round}/data.html, "
        "raise sft.max_length",
    ),
    Threshold(
        "sft.length_ratio",
        "<=",
        "length_high",
        "The same on the other side.",
        "responses are far longer than the demonstrations: SFT has not learnt when to stop; raise sft.num_train_epochs",
    ),
    Threshold(
        "sft.repetition_3 - sft.repetition_3_demonstrations",
        "<=",
        "repetition_rise",
        "Share of 3-grams that a text has said before, against held-out demonstrations; 0.05 is one 3-gram of twenty.",
        "SFT repeats itself: lower sft.learning_rate, add demonstrations, or look for repeated texts in reports/{round}/data.html",
    ),
    Threshold(
        "sft.memorised - sft.memorised_demonstrations",
        "<=",
        "memorised",
        "Share of responses with 8 words in a row from one training text, against held-out demonstrations, which share phrases "
        "without having been learnt (Carlini et al. 2023 call this extraction).",
        "SFT recites its demonstrations: lower sft.num_train_epochs or sft.lora.r, add demonstrations, look for near duplicates "
        "in reports/{round}/data.html (lower prepare.near_duplicate)",
    ),
)

REWARD = (
    Threshold(
        "reward.accuracy_low",
        ">=",
        "accuracy",
        "Wilson's lower bound on held-out pairs. PPO goes where the reward model errs: below 0.8 one pair of five is an "
        "invitation. Where people agree on 0.7 only (hh-rlhf), the presets ask 0.6.",
        "look at reports/{round}/data.html for bad labels and too few pairs, add pairs or epochs (reward.num_train_epochs, in "
        "later rounds reward.continue_epochs)",
    ),
    Threshold(
        "reward.margin",
        ">=",
        "margin",
        "Mean score difference, chosen - rejected, in log-odds. Below 0.5 it is sure of less than 62%: PPO's advantages drown in noise.",
        "chosen and rejected score alike: raise reward.num_train_epochs, in later rounds reward.continue_epochs, or reward.learning_rate",
    ),
    Threshold(
        "reward.accuracy - reward.baseline_longest",
        ">",
        "baseline_lead",
        "Accuracy of choosing the longer text. What length explains, PPO will exploit with length.",
        "length alone does as well: the labels follow length; balance the lengths of chosen and rejected (reports/{round}/data.html)",
    ),
    Threshold(
        "reward.accuracy - reward.baseline_tfidf",
        ">",
        "baseline_lead",
        "Bradley-Terry on TF-IDF of words and pairs of words, trained on the same pairs. A model with 135 million weights that "
        "does not beat counting has learnt words, not texts.",
        "counting words does as well: look for label shortcuts in reports/{round}/data.html, add pairs or epochs "
        "(reward.num_train_epochs, in later rounds reward.continue_epochs)",
    ),
    Threshold(
        "reward.accuracy - battery.judge_accuracy",
        ">=",
        "judge_lead",
        "The judge that no stage trains on, on the same held-out pairs. Some lead of the judge is usual where it was made for "
        "the task; a tenth says that the pairs are too few or wrong.",
        "a judge that never saw your pairs ranks them better: too few pairs, or noisy labels; add pairs or epochs "
        "(reward.num_train_epochs, in later rounds reward.continue_epochs), or reward by the judge (ppo.rewards)",
    ),
    Threshold(
        "battery.worst_slice",
        ">=",
        "worst_slice",
        "Accuracy by length difference, source and margin, of slices with 30 pairs or more; half of what they say at 0.65 is "
        "better than chance with 95%. A mean hides a source whose labels are turned round.",
        "one kind of pair is ranked badly: rounds/{round}/battery/metrics.json `accuracy` says which; add pairs of that length, "
        "source or margin",
        optional=True,
    ),
    Threshold(
        "reward.ece",
        "<=",
        "ece",
        "Expected calibration error (Guo et al. 2017) of sigmoid(margin) on held-out pairs. PPO's reward is this margin: what "
        "is too sure pays too much for the texts it is wrong about.",
        "margins overstate or understate how often it is right (rounds/{round}/reward/calibration.csv): lower "
        "reward.learning_rate or epochs when it is too sure, raise them when it is too unsure",
    ),
    Threshold(
        "reward.reload_max_difference",
        "<=",
        "reload",
        "Largest difference of scores between the model that was trained and the one that a fresh process loads from its files: a lost "
        "or rounded head, another tokenizer. The same weights in the same batches give the same bits; the reward stage itself stops "
        "above 0.001.",
        "do not use this model: run `dvc repro --force reward@{round}`, and if it stays, look at what differs in "
        "rounds/{round}/reward/model (config.json, missing weights)",
    ),
    Threshold(
        "battery.centre",
        "within",
        "centre",
        "Mean score of held-out demonstrations, in standard deviations of training ones, on which the reward stage centres. "
        "PPO's score_clip and missing_eos_penalty are in these units.",
        "scores are not centred on demonstrations, so PPO's advantages, clip and missing_eos_penalty are off: run `dvc repro "
        "reward@{round}` again (it centres as it saves); if it stays, the held-out demonstrations differ from the training ones",
    ),
    Threshold(
        "battery.drift",
        "within",
        "drift",
        "Mean score of fresh SFT samples minus that of demonstrations. SFT's texts are worse (-1.5 on the default); beyond 4 "
        "they are not of the kind that the pairs are of.",
        "what SFT writes scores far from its demonstrations: the reward model judges texts unlike those it learnt from; improve "
        "SFT, or add pairs of SFT's own samples (annotate.annotator: judge)",
    ),
    Threshold(
        "battery.scale",
        ">=",
        "scale_low",
        "Standard deviation of scores of fresh SFT samples over that of demonstrations (1.2 on the default). PPO learns from "
        "differences within these samples.",
        "it hardly tells SFT's samples apart, so that PPO has nothing to climb: add pairs of SFT's own samples (annotate.annotator: judge)",
    ),
    Threshold(
        "battery.scale",
        "<=",
        "scale_high",
        "The same on the other side: a few extreme scores would be all that PPO hears.",
        "scores of SFT's samples spread far wider than those of demonstrations: PPO would chase outliers; lower "
        "reward.learning_rate, raise reward.center_rewards_coefficient",
    ),
    Threshold(
        "battery.length_correlation_partial",
        "within",
        "length_correlation",
        "Correlation of score and length over held-out texts, with the label and the judge's opinion held fixed: what it pays "
        "for length itself.",
        "it pays for length itself: balance lengths of chosen and rejected (reports/{round}/data.html), or set ppo.length_penalty",
    ),
    Threshold(
        "battery.worst_probe",
        "<=",
        "probe",
        "Held-out chosen texts against themselves broken: words shuffled, the best word repeated, cut in half, nothing at all. "
        "PPO finds such texts within some updates.",
        "it likes broken text: rounds/{round}/battery/samples.jsonl shows which; add pairs whose rejected text is broken that way",
    ),
    Threshold(
        "battery.worst_ending",
        "<=",
        "ending",
        "battery.endings after rejected texts of pairs that it ranks rightly: how often they then beat the chosen text. The first "
        'attempt at the default had 0.55 for " Enjoy!", and PPO ended every text with it. 0.3 is half of that, and about what the judge '
        "says itself of the default's pairs (`judged` in the battery's metrics: a loved word is worth something to it too).",
        "an ending buys a better score, and PPO will find it: rounds/{round}/battery/samples.jsonl shows which; the next "
        "round's replay turns pairs against what PPO exploits, or add pairs with that ending on the rejected side",
    ),
    Threshold(
        "battery.worst_mined",
        "<=",
        "mined",
        "The same with phrases that go with high scores in what SFT wrote, and in the round before's rollouts.",
        "an ending that a policy already writes buys a better score: add pairs with it on the rejected side, raise "
        "replay.pairs_per_exploit",
        optional=True,
    ),
    Threshold(
        "battery.best_of_n.rise_low",
        ">",
        "best_of_n_rise",
        "Judged quality of the best of 16 SFT samples by this reward, against one, lower bound over prompts. Best-of-n is what "
        "PPO does without PPO (Gao et al. 2023): when the judge does not like it better, PPO cannot help.",
        "what this reward likes best of SFT's samples the judge does not like better: PPO would be misled; read "
        "rounds/{round}/battery/samples.jsonl, then mend the labels or the pairs",
    ),
)

PROMOTE = (
    Threshold(
        "evaluate.win_rate_low",
        ">",
        "win_rate",
        "Win rate of PPO against SFT on the frozen prompts by the jury (evaluate.judges), lower bound of the paired bootstrap. Half is a "
        "coin.",
        "the policy does not beat SFT clearly enough: if ppo score_mean rose, the reward model was hacked (read "
        "rounds/{round}/evaluate/samples.jsonl, run the next round on its replay: `dvc repro gate_promote@<next round>`); if it "
        "did not, lower ppo.kl_coef or raise ppo.total_episodes",
    ),
    Threshold(
        "evaluate.win_rate_champion_low",
        ">=",
        "champion_win_rate",
        "The same against the champion, the last policy that was promoted; the first round has none. A round that mends badcases "
        "need not win, but must not lose. 88 prompts give an interval of 0.06 to each side, so that a policy that is just as good has a "
        "lower bound of 0.44, give or take 0.06: 0.38 turns one of forty such away, 0.45 two of three. With more prompts, raise it.",
        "it may be worse than the champion: read `champion` beside `ppo` in rounds/{round}/evaluate/samples.jsonl; where the interval is "
        "wide, raise evaluate.samples_per_prompt or prepare.max_eval_prompts; else keep the champion, and look at what this round learnt "
        "from instead (reports/{round}/data.html), or raise ppo.total_episodes",
        optional=True,
    ),
    Threshold(
        "ppo.dangers",
        "<=",
        "dangers",
        "Dangers that PPO's health monitor found (docs/ppo.md) up to the rollout of the policy that is kept; later ones are of policies "
        "that were thrown away. A win rate does not show them: one ending for all prompts may please the judge too.",
        "rounds/{round}/ppo/health.json names each danger, its cause and what to change first; read rounds/{round}/ppo/rollouts around "
        "that update",
    ),
    Threshold(
        "evaluate.ppo.kl",
        "<=",
        "max_kl",
        "Nats a sequence from SFT. The reward model knows SFT's texts; the further from them, the less its scores mean.",
        "too far from SFT: lower ppo.target_kl, raise ppo.kl_coef, or promote an earlier checkpoint (evaluate/curves.csv)",
    ),
    Threshold(
        "evaluate.ppo.distinct_2",
        ">=",
        "distinct_2",
        "Distinct pairs of words over all prompts' responses. Reward hacking on the default is one template for all prompts: it "
        "falls below 0.4 there.",
        "one template for all prompts (mode collapse; see rounds/{round}/evaluate/samples.jsonl): raise ppo.kl_coef or "
        "ppo.entropy_coef, lower ppo.learning_rate",
    ),
    Threshold(
        "evaluate.ppo.repetition_3 - evaluate.sft.repetition_3",
        "<=",
        "repetition_rise",
        "Share of 3-grams that a text has said before, against SFT's own.",
        "texts repeat themselves (see rounds/{round}/evaluate/samples.jsonl): raise ppo.kl_coef, lower ppo.learning_rate or "
        "ppo.response_length",
    ),
    Threshold(
        "evaluate.sft.eos_rate - evaluate.ppo.eos_rate",
        "<=",
        "eos_fall",
        "Responses that end within ppo.response_length, SFT's share less the policy's. Of 88 prompts with 2 samples each, 0.1 is two "
        "standard errors. On the default PPO ends more texts than SFT (+0.12 to +0.32 over three seeds); DPO, which judges prefer just as "
        "much, far fewer (-0.37 to -0.48): nothing in a pair's loss pays for an end, and no judge of a cut text misses it.",
        "responses do not end: raise ppo.missing_eos_penalty; with dpo, which has no such price, lower dpo.learning_rate or take "
        "another algorithm; or raise ppo.response_length, where longer texts are what you want",
    ),
    Threshold(
        "replay.regressed",
        "<=",
        "regressed",
        "Badcases that an earlier round had repaired (none of replay.tries new responses failed) and that all fail again, or whose better "
        "answer the reward model now puts last. What was mended once has to stay so.",
        "`rondo badcases list --state regressed` shows them: were their rows left out of this round's data (replay.max_share, "
        "reports/{round}/data.html)? Raise reward.continue_epochs or sft.continue_epochs",
    ),
    Threshold(
        "capability.worst_fall",
        "<=",
        "slice_fall",
        "How much worse than SFT the policy is where it is worst: of the prompts in slices/ (safe ones that it refuses, harmful ones that "
        "it answers) and the tasks of capability.tasks. A share, upper bound of Bonett and Price's interval (2012), which is wide for few "
        "prompts: fewer than 26 never pass, even where nothing differs. A reward model that knows nothing of them lets them slip.",
        "rounds/{round}/capability/metrics.json `worst` names the slice, samples.jsonl beside it has both answers: where the interval is "
        "wide, give more prompts; else raise ppo.kl_coef, or add such prompts and pairs to your data (not these)",
        optional=True,
    ),
    Threshold(
        "evaluate.human_nll_rise",
        "<=",
        "human_nll_rise",
        "What people's held-out texts cost the policy more than SFT, nats a token. The default's policies cost 0.5 more; a whole nat makes "
        "each token of people's texts 2.7 times as unlikely, more than SFT had gained on the base model.",
        "the policy has forgotten how people write: raise ppo.kl_coef, lower ppo.learning_rate or ppo.total_episodes",
    ),
)

THRESHOLDS: dict[str, tuple[Threshold, ...]] = {"sft": SFT, "reward": REWARD, "promote": PROMOTE}
GATE_STAGES: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "reward": ("reward", "battery"),
    "promote": ("evaluate", "ppo", "replay", "capability"),
}
"""The stages whose metrics.json a gate reads."""


def format_threshold(band: Threshold, bound: float) -> str:
    """`>= 0.8`, or `within +-0.3`."""
    return f"{'within +-' if band.compare == 'within' else f'{band.compare} '}{bound:.4g}"


def markdown(gate: str, gates: GatesParams) -> str:
    """A gate's bands as a table."""
    rows = ["| number | band | why | when it is outside |", "|---|---|---|---|"]
    for band in THRESHOLDS[gate]:
        bound = format_threshold(band, getattr(getattr(gates, gate), band.bound))
        rows.append(
            f"| `{band.metric}` | {bound}<br>`gates.{gate}.{band.bound}` | {band.why} | {band.fix} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    for name in THRESHOLDS:
        print(f"## {name}\n\n{markdown(name, GatesParams())}\n")
