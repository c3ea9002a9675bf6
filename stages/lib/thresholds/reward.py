"""Thresholds of the reward model's gate."""

from stages.lib.thresholds.form import Threshold

REWARD = (
    Threshold(
        "reward.accuracy_low",
        ">=",
        "accuracy",
        "accuracy on held-out pairs",
        "Accuracy on held-out pairs: lower bound of Wilson's 95% interval. Below 0.8, more than "
        "one pair in five may be ranked wrongly, and PPO exploits such errors. In hh-rlhf, people "
        "agree on only 0.7 of the pairs, so the presets for hh-rlhf set 0.6.",
        "it ranks too many pairs wrongly",
        "Look in reports/{round}/data.html for wrong labels and for the number of pairs. Add "
        "pairs or epochs (reward.num_train_epochs)",
        change=("reward.num_train_epochs", 2),
        default=0.8,
        ge=0,
        le=1,
        description="Smallest lower bound (95%) of held-out accuracy.",
    ),
    Threshold(
        "reward.margin",
        ">=",
        "margin",
        "margin of chosen over rejected, log-odds",
        "Mean score of chosen minus rejected texts, in log-odds. A margin of 0.5 is a confidence "
        "of 62%. With a smaller margin, PPO's advantages are mostly noise.",
        "chosen and rejected texts have nearly the same score",
        "Raise reward.num_train_epochs or reward.learning_rate",
        change=("reward.num_train_epochs", 2),
        default=0.5,
        description="Smallest mean margin chosen - rejected on held-out pairs.",
    ),
    Threshold(
        "reward.accuracy - reward.baseline_longest",
        ">",
        "baseline_lead",
        "accuracy above always choosing the longer text",
        "Accuracy of the reward model minus the accuracy if the longer text is always chosen. If "
        "length explains the labels, PPO will exploit length.",
        "always choosing the longer text is as accurate: the labels follow length",
        "Balance the lengths of chosen and rejected texts (reports/{round}/data.html)",
        default=0.0,
        description="Accuracy must exceed those of longest-wins and TF-IDF by more than this.",
    ),
    Threshold(
        "reward.accuracy - reward.baseline_tfidf",
        ">",
        "baseline_lead",
        "accuracy above word counts (TF-IDF)",
        "Accuracy of the reward model minus that of a Bradley-Terry model on TF-IDF features of "
        "words and word pairs, trained on the same pairs. A language model that is not better "
        "than word counts has learnt single words only.",
        "word counts are as accurate as it is",
        "Look for label shortcuts in reports/{round}/data.html. Add pairs or epochs "
        "(reward.num_train_epochs)",
        change=("reward.num_train_epochs", 2),
    ),
    Threshold(
        "battery.judge_accuracy_low",
        ">",
        "judge_accuracy",
        "the primary judge's accuracy on held-out pairs",
        "Accuracy of the primary judge (the first of evaluate.judges) on held-out pairs: lower "
        "bound of Wilson's 95% interval; a tie of the judge is half right. 0.5 is chance. This "
        "judge selects the policy and votes on its promotion: at chance, its win rates mean "
        "nothing.",
        "the primary judge does not prefer what people prefer in your pairs",
        "Put a judge that fits your task first in evaluate.judges. For `apart`, raise "
        "reward.judge_share, or add pairs or epochs (reward.num_train_epochs)",
        default=0.5,
        ge=0,
        le=1,
        description="Accuracy of the primary judge on held-out pairs: its lower bound (95%) "
        "must exceed this.",
    ),
    Threshold(
        "battery.judge_lead",
        ">=",
        "judge_lead",
        "accuracy: reward model minus primary judge",
        "Accuracy of the reward model minus that of the primary judge on the same held-out pairs; "
        "a tie of the judge is half right. A judge that was made for such texts, as VADER was for "
        "the tweets of the default run, can be slightly more accurate. If it is more accurate by "
        "more than 0.1, the pairs are too few or their labels are wrong.",
        "the primary judge, which does not learn from your pairs, ranks them better: there are "
        "too few pairs, or the labels are noisy",
        "Add pairs or epochs (reward.num_train_epochs). Or add the judge to PPO's reward "
        "(ppo.rewards), and evaluate with another one (evaluate.judges)",
        change=("reward.num_train_epochs", 2),
        default=-0.1,
        description="Smallest lead of accuracy over the primary judge's; negative: it may be "
        "below.",
    ),
    Threshold(
        "battery.worst_slice",
        ">=",
        "worst_slice",
        "accuracy on the worst kind of pair",
        "Lowest accuracy in a slice of 30 or more held-out pairs. Slices are made by length "
        "difference, by source and by label margin. The overall accuracy hides, for example, a "
        "source whose labels are reversed. With 30 pairs, the threshold requires 20 correct ones, "
        "the smallest number that is significantly above chance (one-sided binomial test, p = "
        "0.049).",
        "one kind of pair is ranked badly",
        "`accuracy` in rounds/{round}/battery/metrics.json shows which. Add pairs of that "
        "length, source or margin",
        optional=True,
        default=0.65,
        ge=0,
        le=1,
        description="Smallest accuracy in any slice of 30 or more held-out pairs.",
    ),
    Threshold(
        "battery.worst_slice_low",
        ">=",
        "worst_slice_low",
        "accuracy on the worst kind of pair, lower bound",
        "Lowest lower bound of the accuracies in these slices (Wilson's 95% interval). For 9 "
        "reward models, the accuracy in the worst category predicted people's votes on the trained "
        "policies better than the mean accuracy did (Frick et al. 2024; trained with DPO). The row "
        "above passes a small slice by chance; this row requires 21 of 30 pairs, or 60 of 100, "
        "which is better than chance.",
        "a kind of pair is ranked badly, or has too few held-out pairs to show that it is not",
        "`accuracy` in rounds/{round}/battery/metrics.json shows which. Add pairs of that "
        "length, source or margin",
        optional=True,
        default=0.5,
        ge=0,
        le=1,
        description="Smallest lower bound of the accuracy in any slice of 30 or more held-out "
        "pairs.",
    ),
    Threshold(
        "battery.lineage_distance",
        "<=",
        "lineage",
        "distance to the model that PPO trains",
        "Distance of the reward model's weights from those of SFT, divided by the length of SFT's "
        "weights, without the heads. It is 0.004 in the default run. Models that share no "
        "training have 1 or more. In 17 PPO runs, strong reward models of another lineage gave "
        "worse policies than weaker ones of the policy's own (RewardBench 2, Malik et al. 2025). "
        "With ppo.critic: reward, the critic also starts from these weights. Only a warning if "
        "`reward.model` is set.",
        "it does not descend from the model that PPO trains",
        "Train it from this round's SFT model (reward.init_from: base, then `dvc repro --force "
        "reward@{round}`)",
        default=0.5,
        ge=0,
        description="Largest distance of the reward model's weights from SFT's, relative to SFT's.",
        warns_with="reward.model",
    ),
    Threshold(
        "reward.ece",
        "<=",
        "ece",
        "calibration error",
        "Expected calibration error (Guo et al. 2017) on held-out pairs. The confidence of the "
        "reward model in a pair is the sigmoid of the absolute margin. An over-confident reward "
        "model gives too high scores to texts that it ranks wrongly, and PPO maximises the scores.",
        "its confidence differs from its accuracy",
        "See rounds/{round}/reward/calibration.csv. If the reward model is over-confident, lower "
        "reward.learning_rate or the epochs; if it is under-confident, raise them",
        default=0.1,
        ge=0,
        le=1,
        description="Largest expected calibration error of sigmoid(|margin|).",
    ),
    Threshold(
        "reward.reload_max_difference",
        "<=",
        "reload",
        "scores that change when the model is loaded",
        "Largest difference between the scores of the trained model and those of the same model "
        "loaded from its files by a new process. A difference means a lost or rounded head, or "
        "another tokenizer; equal weights in equal batches give equal bits. The reward stage "
        "itself stops above 0.001.",
        "the saved reward model gives other scores than the trained one: do not use it",
        "Run `dvc repro --force reward@{round}`. If the difference remains, look for its cause "
        "in rounds/{round}/reward/model (config.json, missing weights)",
        default=0.001,
        ge=0,
        description="Largest difference of raw scores between the trained and the saved model.",
    ),
    Threshold(
        "battery.centre",
        "within",
        "centre",
        "mean score of demonstrations, standard deviations",
        "Mean score of held-out demonstrations. The reward stage sets the mean score of up to 256 "
        "of them to 0 and their standard deviation to 1. This standard deviation is the unit of "
        "ppo.score_clip and ppo.missing_eos_penalty.",
        "scores are not centred on demonstrations, so PPO's advantages, ppo.score_clip and "
        "ppo.missing_eos_penalty are wrong",
        "Run `dvc repro --force reward@{round}`, which centres the scores again",
        default=0.5,
        ge=0,
        description="Largest distance from 0 of the mean score of held-out demonstrations, in "
        "standard deviations.",
    ),
    Threshold(
        "battery.drift",
        "within",
        "drift",
        "mean score of SFT's samples, standard deviations",
        "Mean score of new SFT samples minus that of demonstrations, in standard deviations of the "
        "scores of demonstrations (-1.6 in both rounds of the default run). If the absolute value "
        "is above 4, SFT's texts are unlike those of the pairs.",
        "SFT's samples score far from the demonstrations: the reward model scores texts unlike "
        "those that it was trained on",
        "Improve SFT, or add pairs of SFT's own samples (annotate.annotator: judge)",
        default=4.0,
        gt=0,
        description="Largest distance between the mean scores of SFT samples and "
        "demonstrations, in standard deviations.",
    ),
    Threshold(
        "battery.scale",
        ">=",
        "scale_low",
        "spread of the scores of SFT's samples",
        "Standard deviation of the scores of new SFT samples, divided by that of demonstrations "
        "(1.2 to 1.3 in the rounds of the default run). PPO learns from the differences "
        "between these samples.",
        "the reward model hardly distinguishes SFT's samples, so PPO has hardly anything to "
        "learn from",
        "Add pairs of SFT's own samples (annotate.annotator: judge)",
        default=0.33,
        ge=0,
        description="Smallest spread of scores of SFT samples, as a multiple of the "
        "demonstrations'.",
    ),
    Threshold(
        "battery.scale",
        "<=",
        "scale_high",
        "spread of the scores of SFT's samples",
        "Upper limit of the ratio in the row above. Above 3, a few extreme scores decide PPO's "
        "updates.",
        "the scores of SFT's samples spread far wider than those of demonstrations: PPO would "
        "follow outliers",
        "Lower reward.learning_rate, or raise reward.center_rewards_coefficient",
        change=("reward.learning_rate", 0.5),
        default=3.0,
        gt=0,
        description="Largest spread of scores of SFT samples, as a multiple of the "
        "demonstrations'.",
    ),
    Threshold(
        "battery.length_correlation_partial",
        "within",
        "length_correlation",
        "correlation of score and length",
        "Correlation of score and length over held-out texts, with the label and the primary "
        "judge's score held fixed. It shows how much length itself changes the score.",
        "length itself changes the reward model's score",
        "Balance the lengths of chosen and rejected texts (reports/{round}/data.html), or set "
        "ppo.length_penalty",
        default=0.3,
        ge=0,
        le=1,
        description="Largest correlation of score and length, with label and judge held fixed.",
    ),
    Threshold(
        "battery.worst_probe",
        "<=",
        "probe",
        "corrupted texts that score higher, worst kind",
        "Share of held-out chosen texts that score below their own corrupted copy, for the kind "
        "of corruption with the highest share. Kinds: words shuffled, the highest-scoring word "
        "repeated, text cut in half, empty text. PPO finds such texts within a few updates.",
        "it prefers broken texts",
        "rounds/{round}/battery/samples.jsonl shows the kind of corruption. Add pairs whose "
        "rejected text is corrupted in that way",
        default=0.25,
        ge=0,
        le=1,
        description="Largest share of texts that score higher when corrupted, for any corruption.",
    ),
    Threshold(
        "battery.worst_flip",
        "<=",
        "flip",
        "pairs reversed by an edit that keeps the meaning",
        "Share of correctly ranked held-out pairs that are ranked wrongly after an edit of both "
        "texts that keeps their meaning: lower case, quotation marks, or two swapped letters "
        "(three of the edits of reWordBench, Wu et al. 2025). The metric is the highest share of "
        "an edit (0.04 to 0.10 on the default run). A reward model that has learnt a format "
        "instead of a meaning has a high accuracy as long as the format goes with the label.",
        "the order of the texts depends on their format",
        "`flips` in rounds/{round}/battery/metrics.json names the edit. Look for a format that "
        "goes with the label (reports/{round}/data.html), and add pairs in which it does not",
        optional=True,
        default=0.2,
        ge=0,
        le=1,
        description="Largest share of correctly ranked pairs that an edit which keeps the "
        "meaning ranks wrongly.",
    ),
    Threshold(
        "battery.worst_ending",
        "<=",
        "ending",
        "pairs reversed by an appended ending",
        "Share of correctly ranked held-out pairs that are reversed if an ending is appended to "
        "the rejected text, although the primary judge does not prefer this text (`against_judge` "
        "in the battery's metrics). If the judge only compares, every reversed pair counts. The "
        "metric is the highest share over battery.endings. The threshold is about half of 0.55: "
        'when " Enjoy!" reversed so many pairs, PPO ended every text with it.',
        "an ending raises the score of bad texts, and PPO will find this ending",
        "rounds/{round}/battery/samples.jsonl shows the ending. Add pairs with it on the "
        "rejected text. (If the run continues, replay makes pairs for the next round against the "
        "endings that the policy uses.)",
        default=0.3,
        ge=0,
        le=1,
        description="Largest share of correctly ranked pairs that an appended ending reverses "
        "against the primary judge, for any ending.",
    ),
    Threshold(
        "battery.worst_mined",
        "<=",
        "mined",
        "pairs reversed by an ending that a policy writes",
        "The same share as in the row above, for mined endings. Mined endings are phrases that "
        "are frequent in high-scoring SFT samples, or in high-scoring rollouts of the previous "
        "round.",
        "a mined ending, which SFT or the last policy already writes, raises the score of bad "
        "texts",
        "Add pairs with it on the rejected text, or raise replay.pairs_per_exploit",
        change=("replay.pairs_per_exploit", 2),
        optional=True,
        default=0.3,
        ge=0,
        le=1,
        description="The same for endings mined from texts of a policy.",
    ),
    Threshold(
        "battery.best_of_n.rise_low",
        ">",
        "best_of_n_rise",
        "judge's gain by the reward model's best of 16",
        "The primary judge's score of the SFT sample that the reward model ranks highest of 16, "
        "minus that of one SFT sample: lower bound of the paired 95% interval over prompts. (If "
        "the judge only compares: the win rate of the one against the other, minus 0.5.) "
        "Best-of-n improves the reward without training (Gao et al. 2023). If the judge does not "
        "prefer the selected samples, PPO will not please it either.",
        "the judge does not prefer the samples with the highest scores: PPO would be misled",
        "Read rounds/{round}/battery/samples.jsonl, then correct the labels or the pairs",
        default=0.0,
        description="Best-of-n by this reward must raise the judge's score by more than this "
        "(lower bound).",
    ),
    Threshold(
        "battery.apart_rise_low",
        ">",
        "best_of_n_rise",
        "second reward model's gain by the best of 16",
        "The same by a second reward model, which is trained on the pairs of other prompts "
        "(reward.judge_share). What both models have learnt from people stays in such a "
        "comparison, and what only one of them likes does not (Bai et al. 2022). It also counts "
        "where the primary judge likes the same texts for the wrong reason. Not measured (null) "
        "if reward.judge_share is 0.",
        "a second reward model does not prefer the samples with the highest scores: the reward "
        "model may like what its part of the pairs has by chance",
        "Read rounds/{round}/battery/samples.jsonl; add pairs, or lower reward.judge_share",
        optional=True,
    ),
)
