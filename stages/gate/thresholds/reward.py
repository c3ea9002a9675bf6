"""Thresholds of the reward model's gate."""

from stages.gate.thresholds.form import Threshold

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
        "reward.accuracy - battery.sentiment_accuracy",
        ">=",
        "sentiment_lead",
        "Accuracy of the reward model minus that of the sentiment on the same held-out "
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
        "about the rate at which such an ending raises the sentiment of the default's pairs above "
        "the chosen text's (`sentiment_rate` in the battery's metrics).",
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
        "Rise in sentiment from one SFT sample to the best of 16 by this reward model: "
        "lower bound of the paired 95% interval over prompts. Best-of-n improves the reward "
        "without training (Gao et al. 2023). If the judge does not prefer its samples, PPO "
        "cannot help.",
        "the judge does not prefer the samples that the reward model scores highest: PPO would "
        "be misled. Read rounds/{round}/battery/samples.jsonl, then correct the labels or the "
        "pairs",
    ),
)
