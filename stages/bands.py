"""Every number that a gate looks at: its band, why it has one, and what to do first when it is outside.

A `metric` is a dotted name in the metrics.json of a stage, or the difference of two. `bound` is the key of gates.<gate> in
params.yaml. docs/gates.md explains each (a test compares the two).
"""

from typing import NamedTuple


class Band(NamedTuple):
    """compare: `within`: the absolute value is at most the bound. optional: null, which its stage wrote, is no failure."""

    metric: str
    compare: str
    bound: str
    fix: str
    optional: bool = False


SFT = (
    Band(
        "sft.loss_before - sft.loss_after",
        ">=",
        "loss_drop",
        "SFT learnt too little: look at rounds/{round}/sft/samples.jsonl and curves.csv, raise sft.num_train_epochs (in later "
        "rounds sft.continue_epochs) or sft.learning_rate, or add demonstrations",
    ),
    Band(
        "sft.judged_gain_low",
        ">=",
        "judged_gain",
        "the judge does not find SFT better than the base model: read rounds/{round}/sft/samples.jsonl side by side; are the "
        "demonstrations (reports/{round}/data.html) what you want to read? If they are, and the judge is not of your task "
        "(stages/judges.py), lower this bound",
    ),
    Band(
        "sft.eos_rate_demonstrations - sft.eos_rate",
        "<=",
        "eos_gap",
        "responses do not end: PPO would learn on cut-off texts; check that demonstrations fit sft.max_length (a longer one "
        "loses its EOS), raise sft.num_train_epochs or ppo.response_length",
    ),
    Band(
        "sft.length_ratio",
        ">=",
        "length_low",
        "responses are far shorter than the demonstrations: look for empty or cut demonstrations in reports/{round}/data.html, "
        "raise sft.max_length",
    ),
    Band(
        "sft.length_ratio",
        "<=",
        "length_high",
        "responses are far longer than the demonstrations: SFT has not learnt when to stop; raise sft.num_train_epochs",
    ),
    Band(
        "sft.repetition_3 - sft.repetition_3_demonstrations",
        "<=",
        "repetition_rise",
        "SFT repeats itself: lower sft.learning_rate, add demonstrations, or look for repeated texts in reports/{round}/data.html",
    ),
    Band(
        "sft.memorised - sft.memorised_demonstrations",
        "<=",
        "memorised",
        "SFT recites its demonstrations: lower sft.num_train_epochs or sft.lora.r, add demonstrations, look for near duplicates "
        "in reports/{round}/data.html (lower prepare.near_duplicate)",
    ),
)

REWARD = (
    Band(
        "reward.accuracy_low",
        ">=",
        "accuracy",
        "look at reports/{round}/data.html for bad labels and too few pairs, add pairs or epochs (reward.num_train_epochs, in "
        "later rounds reward.continue_epochs)",
    ),
    Band(
        "reward.margin",
        ">=",
        "margin",
        "chosen and rejected score alike: raise reward.num_train_epochs, in later rounds reward.continue_epochs, or reward.learning_rate",
    ),
    Band(
        "reward.accuracy - reward.baseline_longest",
        ">",
        "baseline_lead",
        "length alone does as well: the labels follow length; balance the lengths of chosen and rejected (reports/{round}/data.html)",
    ),
    Band(
        "reward.accuracy - reward.baseline_tfidf",
        ">",
        "baseline_lead",
        "counting words does as well: look for label shortcuts in reports/{round}/data.html, add pairs or epochs "
        "(reward.num_train_epochs, in later rounds reward.continue_epochs)",
    ),
    Band(
        "reward.accuracy - battery.judge_accuracy",
        ">=",
        "judge_lead",
        "a judge that never saw your pairs ranks them better: too few pairs, or noisy labels; add pairs or epochs "
        "(reward.num_train_epochs, in later rounds reward.continue_epochs), or reward by the judge (ppo.rewards)",
    ),
    Band(
        "battery.worst_slice",
        ">=",
        "worst_slice",
        "one kind of pair is ranked badly: rounds/{round}/battery/metrics.json `accuracy` says which; add pairs of that length, "
        "source or margin",
        optional=True,
    ),
    Band(
        "reward.ece",
        "<=",
        "ece",
        "margins overstate or understate how often it is right (rounds/{round}/reward/calibration.csv): lower "
        "reward.learning_rate or epochs when it is too sure, raise them when it is too unsure",
    ),
    Band(
        "battery.centre",
        "within",
        "centre",
        "scores are not centred on demonstrations, so PPO's advantages, clip and missing_eos_penalty are off: run `dvc repro "
        "reward@{round}` again (it centres as it saves); if it stays, the held-out demonstrations differ from the training ones",
    ),
    Band(
        "battery.drift",
        "within",
        "drift",
        "what SFT writes scores far from its demonstrations: the reward model judges texts unlike those it learnt from; improve "
        "SFT, or add pairs of SFT's own samples (annotate.annotator: judge)",
    ),
    Band(
        "battery.scale",
        ">=",
        "scale_low",
        "it hardly tells SFT's samples apart, so that PPO has nothing to climb: add pairs of SFT's own samples (annotate.annotator: judge)",
    ),
    Band(
        "battery.scale",
        "<=",
        "scale_high",
        "scores of SFT's samples spread far wider than those of demonstrations: PPO would chase outliers; lower "
        "reward.learning_rate, raise reward.center_rewards_coefficient",
    ),
    Band(
        "battery.length_correlation_partial",
        "within",
        "length_correlation",
        "it pays for length itself: balance lengths of chosen and rejected (reports/{round}/data.html), or set ppo.length_penalty",
    ),
    Band(
        "battery.worst_probe",
        "<=",
        "probe",
        "it likes broken text: rounds/{round}/battery/samples.jsonl shows which; add pairs whose rejected text is broken that way",
    ),
    Band(
        "battery.worst_ending",
        "<=",
        "ending",
        "an ending buys a better score, and PPO will find it: rounds/{round}/battery/samples.jsonl shows which; the next "
        "round's replay turns pairs against what PPO exploits, or add pairs with that ending on the rejected side",
    ),
    Band(
        "battery.worst_mined",
        "<=",
        "mined",
        "an ending that a policy already writes buys a better score: add pairs with it on the rejected side, raise "
        "replay.pairs_per_exploit",
        optional=True,
    ),
    Band(
        "battery.best_of_n.rise_low",
        ">",
        "best_of_n_rise",
        "what this reward likes best of SFT's samples the judge does not like better: PPO would be misled; read "
        "rounds/{round}/battery/samples.jsonl, then mend the labels or the pairs",
    ),
)

PROMOTE = (
    Band(
        "evaluate.win_rate_low",
        ">",
        "win_rate",
        "the policy does not beat SFT clearly enough: if ppo score_mean rose, the reward model was hacked (read "
        "rounds/{round}/evaluate/samples.jsonl, run the next round on its replay: `dvc repro gate_promote@<next round>`); if it "
        "did not, lower ppo.kl_coef or raise ppo.total_episodes",
    ),
    Band(
        "evaluate.ppo.kl",
        "<=",
        "max_kl",
        "too far from SFT: lower ppo.target_kl, raise ppo.kl_coef, or promote an earlier checkpoint (evaluate/curves.csv)",
    ),
    Band(
        "evaluate.ppo.distinct_2",
        ">=",
        "distinct_2",
        "one template for all prompts (mode collapse; see rounds/{round}/evaluate/samples.jsonl): raise ppo.kl_coef or "
        "ppo.entropy_coef, lower ppo.learning_rate",
    ),
    Band(
        "evaluate.ppo.repetition_3 - evaluate.sft.repetition_3",
        "<=",
        "repetition_rise",
        "texts repeat themselves (see rounds/{round}/evaluate/samples.jsonl): raise ppo.kl_coef, lower ppo.learning_rate or "
        "ppo.response_length",
    ),
)

BANDS: dict[str, tuple[Band, ...]] = {"sft": SFT, "reward": REWARD, "promote": PROMOTE}
STAGES: dict[str, tuple[str, ...]] = {"sft": ("sft",), "reward": ("reward", "battery"), "promote": ("evaluate",)}
"""The stages whose metrics.json a gate reads."""
