"""Every metric that a gate checks: its threshold, the reason for it, and what to do if it fails.

`python -m stages.gate.thresholds` prints the tables of docs/gates.md.
"""

from stages.gate.threshold import Threshold, format_threshold
from stages.lib.core.params.gates import GatesParams

SFT = (
    Threshold(
        "sft.loss_before - sft.loss_after",
        ">=",
        "loss_drop",
        "Drop of the loss on held-out demonstrations below that of the base model, in nats per "
        "token. On the default, 0.7 epochs bring a drop of 0.6; 0.2 is a third of that. A "
        "smaller drop is noise of a few hundred texts, or a learning rate that does nothing.",
        "SFT learnt too little: look at rounds/{round}/sft/samples.jsonl and curves.csv. Raise "
        "sft.num_train_epochs (in later rounds sft.continue_epochs) or sft.learning_rate, or add "
        "demonstrations",
    ),
    Threshold(
        "sft.judged_gain_low",
        ">=",
        "judged_gain",
        "Gain in judged sentiment of SFT over the base model: lower bound of the paired 95% "
        "interval over prompts. Both models answer the frozen prompts sft.samples_per_prompt "
        "times with the same random numbers. SFT need not raise the judge's score, but must not "
        "lower it. Two texts that differ by less than evaluate.tie_margin (0.05) count as equal.",
        "the judge may find SFT worse than the base model: compare both in "
        "rounds/{round}/sft/samples.jsonl. Are the demonstrations (reports/{round}/data.html) "
        "texts that you want? If they are, and the judge (stages/lib/judging/lexicon.py) does "
        "not fit your task, lower this threshold",
    ),
    Threshold(
        "sft.eos_rate_demonstrations - sft.eos_rate",
        "<=",
        "eos_gap",
        "Share of held-out demonstrations that fit into ppo.response_length tokens, minus the "
        "share of responses that end within it. If responses do not end, PPO trains on cut-off "
        "texts, which the reward model has never seen.",
        "responses do not end: PPO would learn on cut-off texts. Check that demonstrations fit "
        "into sft.max_length (a longer one loses its EOS). Raise sft.num_train_epochs or "
        "ppo.response_length",
    ),
    Threshold(
        "sft.length_ratio",
        ">=",
        "length_low",
        "Mean length of responses divided by that of held-out demonstrations, in tokens, both "
        "cut at ppo.response_length. A ratio of 0.5 is far outside the sampling noise of 88 "
        "texts.",
        "responses are far shorter than the demonstrations: look for empty or cut demonstrations "
        "in reports/{round}/data.html, or raise sft.max_length",
    ),
    Threshold(
        "sft.length_ratio",
        "<=",
        "length_high",
        "Upper limit of the same ratio.",
        "responses are far longer than the demonstrations: SFT has not learnt when to stop. "
        "Raise sft.num_train_epochs",
    ),
    Threshold(
        "sft.repetition_3 - sft.repetition_3_demonstrations",
        "<=",
        "repetition_rise",
        "Share of 3-grams that occurred earlier in the same text: responses minus held-out "
        "demonstrations. 0.05 is one 3-gram in twenty.",
        "SFT repeats itself: lower sft.learning_rate, add demonstrations, or look for repeated "
        "texts in reports/{round}/data.html",
    ),
    Threshold(
        "sft.memorised - sft.memorised_demonstrations",
        "<=",
        "memorised",
        "Share of texts with 8 words in a row from one training text: responses minus held-out "
        "demonstrations. Held-out demonstrations also share phrases with training texts, but did "
        "not learn them (Carlini et al. 2023 call learnt copies extraction).",
        "SFT recites its demonstrations: lower sft.num_train_epochs or sft.lora.r, or add "
        "demonstrations. Look for near duplicates in reports/{round}/data.html, and lower "
        "prepare.near_duplicate if there are any",
    ),
)

REWARD = (
    Threshold(
        "reward.accuracy_low",
        ">=",
        "accuracy",
        "Accuracy on held-out pairs: lower bound of Wilson's 95% interval. PPO exploits the "
        "errors of the reward model; below 0.8 that may be one pair in five. In hh-rlhf people "
        "agree on only 0.7 of the pairs, so its presets set 0.6.",
        "look at reports/{round}/data.html for bad labels and too few pairs. Add pairs or epochs "
        "(reward.num_train_epochs, in later rounds reward.continue_epochs)",
    ),
    Threshold(
        "reward.margin",
        ">=",
        "margin",
        "Mean score of chosen minus rejected texts, in log-odds. A margin of 0.5 is a confidence "
        "of 62%. Below that, PPO's advantages are mostly noise.",
        "chosen and rejected score alike: raise reward.num_train_epochs (in later rounds "
        "reward.continue_epochs) or reward.learning_rate",
    ),
    Threshold(
        "reward.accuracy - reward.baseline_longest",
        ">",
        "baseline_lead",
        "Accuracy of the reward model minus the accuracy of always choosing the longer text. If "
        "length explains the labels, PPO will exploit length.",
        "length alone does as well: the labels follow length. Balance the lengths of chosen and "
        "rejected texts (reports/{round}/data.html)",
    ),
    Threshold(
        "reward.accuracy - reward.baseline_tfidf",
        ">",
        "baseline_lead",
        "Accuracy of the reward model minus that of a Bradley-Terry model on TF-IDF features of "
        "words and word pairs, trained on the same pairs. A model with 135 million weights that "
        "does not beat word counts has learnt words, not texts.",
        "counting words does as well: look for label shortcuts in reports/{round}/data.html. Add "
        "pairs or epochs (reward.num_train_epochs, in later rounds reward.continue_epochs)",
    ),
    Threshold(
        "reward.accuracy - battery.judge_accuracy",
        ">=",
        "judge_lead",
        "Accuracy of the reward model minus that of the lexicon judge on the same held-out "
        "pairs. By default no stage trains on this judge. A judge that was made for the task is "
        "often slightly better. If it is better by 0.1, the pairs are too few or wrong.",
        "a judge that never saw your pairs ranks them better: there are too few pairs, or the "
        "labels are noisy. Add pairs or epochs (reward.num_train_epochs, in later rounds "
        "reward.continue_epochs). Or add the judge's score to PPO's reward (ppo.rewards), and "
        "evaluate with other judges (evaluate.judges)",
    ),
    Threshold(
        "battery.worst_slice",
        ">=",
        "worst_slice",
        "Lowest accuracy in a slice of 30 or more held-out pairs. Slices are made by length "
        "difference, by source and by label margin. The overall accuracy hides, for example, a "
        "source whose labels are reversed. Of 30 pairs, 20 right are significantly above chance "
        "(one-sided binomial test, p = 0.049). A slice with a true accuracy of 0.65 reaches 20 "
        "in half of all cases.",
        "one kind of pair is ranked badly: `accuracy` in rounds/{round}/battery/metrics.json "
        "shows which. Add pairs of that length, source or margin",
        optional=True,
    ),
    Threshold(
        "reward.ece",
        "<=",
        "ece",
        "Expected calibration error (Guo et al. 2017) of sigmoid(margin) on held-out pairs. PPO "
        "maximises these scores: an over-confident reward model pays too much for texts that it "
        "ranks wrongly.",
        "the confidence differs from the accuracy (rounds/{round}/reward/calibration.csv). If "
        "the reward model is over-confident, lower reward.learning_rate or the epochs; if it is "
        "under-confident, raise them",
    ),
    Threshold(
        "reward.reload_max_difference",
        "<=",
        "reload",
        "Largest difference between the scores of the trained model and those of the same model "
        "loaded from its files by a fresh process. A difference means a lost or rounded head, or "
        "another tokenizer. The same weights in the same batches give the same bits. The reward "
        "stage itself stops above 0.001.",
        "do not use this model: run `dvc repro --force reward@{round}`. If the difference stays, "
        "look for its cause in rounds/{round}/reward/model (config.json, missing weights)",
    ),
    Threshold(
        "battery.centre",
        "within",
        "centre",
        "Mean score of held-out demonstrations. The reward stage sets the mean of training "
        "demonstrations to 0 and their standard deviation to 1. ppo.score_clip and "
        "ppo.missing_eos_penalty are in this unit.",
        "scores are not centred on demonstrations, so PPO's advantages, ppo.score_clip and "
        "ppo.missing_eos_penalty are wrong. Run `dvc repro reward@{round}` again (it centres "
        "when it saves). If it stays, the held-out demonstrations differ from the training ones",
    ),
    Threshold(
        "battery.drift",
        "within",
        "drift",
        "Mean score of fresh SFT samples minus that of demonstrations, in standard deviations. "
        "SFT's texts are worse (-1.5 on the default). Beyond 4 they are unlike the texts of the "
        "pairs.",
        "SFT's samples score far from the demonstrations: the reward model scores texts unlike "
        "those it was trained on; improve SFT, or add pairs of SFT's own samples "
        "(annotate.annotator: judge)",
    ),
    Threshold(
        "battery.scale",
        ">=",
        "scale_low",
        "Standard deviation of the scores of fresh SFT samples, divided by that of "
        "demonstrations (1.2 on the default). PPO learns from the differences between these "
        "samples.",
        "the reward model hardly distinguishes SFT's samples, so PPO has nothing to climb: add "
        "pairs of SFT's own samples (annotate.annotator: judge)",
    ),
    Threshold(
        "battery.scale",
        "<=",
        "scale_high",
        "Upper limit of the same ratio. Above it, a few extreme scores decide PPO's updates.",
        "the scores of SFT's samples spread far wider than those of demonstrations: PPO would "
        "chase outliers. Lower reward.learning_rate, or raise reward.center_rewards_coefficient",
    ),
    Threshold(
        "battery.length_correlation_partial",
        "within",
        "length_correlation",
        "Correlation of score and length over held-out texts, with the label and the judge's "
        "score held fixed. It shows how much the reward model pays for length itself.",
        "the reward model pays for length itself: balance the lengths of chosen and rejected "
        "texts (reports/{round}/data.html), or set ppo.length_penalty",
    ),
    Threshold(
        "battery.worst_probe",
        "<=",
        "probe",
        "Share of held-out chosen texts that score below their own corrupted copy, for the worst "
        "kind of corruption: words shuffled, the best word repeated, cut in half, or empty. PPO "
        "finds such texts within a few updates.",
        "it likes broken text: rounds/{round}/battery/samples.jsonl shows which kind. Add pairs "
        "whose rejected text is corrupted in that way",
    ),
    Threshold(
        "battery.worst_ending",
        "<=",
        "ending",
        "Share of correctly ranked pairs that are reversed if an ending is appended to the "
        "rejected text, for the worst of battery.endings. The first version of the default had "
        '0.55 for " Enjoy!", and PPO ended every text with it. 0.3 is about half of that, and '
        "about the judge's own rate on the default's pairs (`judged` in the battery's metrics), "
        "because positive words also raise the judge's score.",
        "an ending buys a better score, and PPO will find it: "
        "rounds/{round}/battery/samples.jsonl shows which. The next round's replay makes pairs "
        "against the endings that PPO exploits. Or add pairs with that ending on the rejected "
        "text",
    ),
    Threshold(
        "battery.worst_mined",
        "<=",
        "mined",
        "The same for mined endings: phrases that are frequent in high-scoring SFT samples, or "
        "in high-scoring rollouts of the previous round.",
        "an ending that a policy already writes buys a better score: add pairs with it on the "
        "rejected text, or raise replay.pairs_per_exploit",
        optional=True,
    ),
    Threshold(
        "battery.best_of_n.rise_low",
        ">",
        "best_of_n_rise",
        "Rise in judged sentiment from one SFT sample to the best of 16 by this reward model: "
        "lower bound of the paired 95% interval over prompts. Best-of-n improves the reward "
        "without training (Gao et al. 2023). If the judge does not prefer its samples, PPO "
        "cannot help.",
        "the judge does not prefer the samples that the reward model scores highest: PPO would "
        "be misled. Read rounds/{round}/battery/samples.jsonl, then correct the labels or the "
        "pairs",
    ),
)

PROMOTE = (
    Threshold(
        "evaluate.win_rate_low",
        ">",
        "win_rate",
        "Win rate of the policy against SFT on the frozen prompts, by the jury "
        "(evaluate.judges): lower bound of the paired bootstrap interval. 0.5 is chance.",
        "the policy does not beat SFT clearly enough. If score_mean of the ppo stage rose, the "
        "policy exploits the reward model: read rounds/{round}/evaluate/samples.jsonl and run "
        "the next round on its replay (`dvc repro gate_promote@<next round>`). If it did not "
        "rise, lower ppo.kl_coef or raise ppo.total_episodes",
    ),
    Threshold(
        "evaluate.win_rate_champion_low",
        ">=",
        "champion_win_rate",
        "The same against the champion, the last policy that was promoted; the first round has "
        "none. A round that repairs badcases need not win, but must not lose. With 88 prompts "
        "the interval reaches 0.06 to each side, so an equally good policy has a lower bound of "
        "0.44 +- 0.06. A threshold of 0.38 rejects one such policy in forty; 0.45 would reject "
        "two in three. With more prompts, raise it.",
        "the policy may be worse than the champion: compare `champion` and `ppo` in "
        "rounds/{round}/evaluate/samples.jsonl. If the interval is wide, raise "
        "evaluate.samples_per_prompt or prepare.max_eval_prompts. Otherwise keep the champion "
        "and check this round's training data (reports/{round}/data.html), or raise "
        "ppo.total_episodes",
        optional=True,
    ),
    Threshold(
        "ppo.dangers",
        "<=",
        "dangers",
        "Dangers that PPO's health monitor (docs/ppo.md) found up to the rollout of the selected "
        "policy. Later dangers belong to policies that were discarded. A win rate does not show "
        "them: the judge too may like a text that ends in the same way for all prompts.",
        "rounds/{round}/ppo/health.json names each danger, its cause and what to change first. "
        "Read rounds/{round}/ppo/rollouts around that update",
    ),
    Threshold(
        "evaluate.ppo.kl",
        "<=",
        "max_kl",
        "KL from SFT, in nats per sequence. The reward model was trained on texts near SFT's; "
        "further away, its scores mean less.",
        "the policy is too far from SFT: lower ppo.target_kl, raise ppo.kl_coef, or promote an "
        "earlier checkpoint (rounds/{round}/evaluate/curves.csv)",
    ),
    Threshold(
        "evaluate.ppo.distinct_2",
        ">=",
        "distinct_2",
        "Share of distinct word pairs in the responses to all prompts. On the default, reward "
        "hacking is one template for all prompts; this share is then below 0.4.",
        "one template for all prompts (mode collapse, see "
        "rounds/{round}/evaluate/samples.jsonl): raise ppo.kl_coef or ppo.entropy_coef, or lower "
        "ppo.learning_rate",
    ),
    Threshold(
        "evaluate.ppo.repetition_3 - evaluate.sft.repetition_3",
        "<=",
        "repetition_rise",
        "Share of 3-grams that occurred earlier in the same text: the policy's minus SFT's.",
        "texts repeat themselves (see rounds/{round}/evaluate/samples.jsonl): raise ppo.kl_coef, "
        "or lower ppo.learning_rate or ppo.response_length",
    ),
    Threshold(
        "evaluate.sft.eos_rate - evaluate.ppo.eos_rate",
        "<=",
        "eos_fall",
        "Share of responses that end within ppo.response_length: SFT's minus the policy's. With "
        "88 prompts and 2 samples each, 0.1 is two standard errors. On the default, PPO ends "
        "more texts than SFT (+0.12 to +0.32 over three seeds). DPO ends far fewer (-0.37 to "
        "-0.48), although the judges like it as much: its loss does not reward an end, and the "
        "judges do not notice that a text was cut off.",
        "responses do not end: raise ppo.missing_eos_penalty. DPO has no such penalty: lower "
        "dpo.learning_rate or choose another algorithm. If you want longer texts, raise "
        "ppo.response_length",
    ),
    Threshold(
        "replay.regressed",
        "<=",
        "regressed",
        "Badcases that an earlier round repaired (none of replay.tries new responses failed) and "
        "that fail again: all new responses fail, or the reward model prefers the bad answer. A "
        "repaired badcase has to stay repaired.",
        "`rondo badcases list --state regressed` lists them. Were their rows left out of this "
        "round's data (replay.max_share, reports/{round}/data.html)? Raise "
        "reward.continue_epochs or sft.continue_epochs",
    ),
    Threshold(
        "capability.worst_fall",
        "<=",
        "slice_fall",
        "How much worse than SFT the policy is in its worst slice or task: a share, upper bound "
        "of Bonett and Price's paired 95% interval (2012). Slices are the prompts in slices/: "
        "safe ones that the policy refuses, unsafe ones that it answers. Tasks are those of "
        "capability.tasks. The reward model knows nothing of them, so PPO can make them worse. "
        "Few prompts give a wide interval: fewer than 26 never pass, even if nothing differs.",
        "`worst` in rounds/{round}/capability/metrics.json names the slice or task; "
        "samples.jsonl beside it has both answers. If the interval is wide, add prompts. "
        "Otherwise raise ppo.kl_coef, or add similar prompts and pairs (not these) to your "
        "training data",
        optional=True,
    ),
    Threshold(
        "evaluate.human_nll_rise",
        "<=",
        "human_nll_rise",
        "Loss on held-out human texts: the policy's minus SFT's, in nats per token. It is about "
        "0.5 for the default's policies. A rise of 1 nat makes each token of human text 2.7 "
        "times less likely, which is more than SFT had gained over the base model.",
        "the policy has forgotten how people write: raise ppo.kl_coef, or lower "
        "ppo.learning_rate or ppo.total_episodes",
    ),
)

THRESHOLDS: dict[str, tuple[Threshold, ...]] = {"sft": SFT, "reward": REWARD, "promote": PROMOTE}


def markdown(gate: str, gates: GatesParams) -> str:
    """The thresholds of a gate as a Markdown table."""
    rows = ["| metric | threshold | why | if it fails |", "|---|---|---|---|"]
    for threshold in THRESHOLDS[gate]:
        metric, key, why, fix = threshold.metric, threshold.bound, threshold.why, threshold.fix
        wanted = format_threshold(threshold, getattr(getattr(gates, gate), key))
        rows.append(f"| `{metric}` | {wanted}<br>`gates.{gate}.{key}` | {why} | {fix} |")
    return "\n".join(rows)


if __name__ == "__main__":
    for name in THRESHOLDS:
        print(f"## {name}\n\n{markdown(name, GatesParams())}\n")
