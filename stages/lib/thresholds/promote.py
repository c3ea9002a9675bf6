"""Thresholds of the promotion gate: is the policy better than SFT, no worse than the champion, and
unharmed?
"""

from stages.lib.thresholds.form import Threshold

PROMOTE = (
    Threshold(
        "evaluate.win_rate_low",
        ">",
        "win_rate",
        "win rate against SFT",
        "Win rate of the policy against SFT on the frozen prompts, by the jury (evaluate.judges): "
        "lower bound of the paired bootstrap interval. 0.5 is chance.",
        "its policy does not beat SFT clearly enough",
        "If score_mean of the ppo stage rose, the policy exploits the reward model: read "
        "rounds/{round}/evaluate/samples.jsonl, then run `rondo next-round`, which trains on the "
        "failures of this round. If score_mean did not rise, lower ppo.kl_coef or raise "
        "ppo.total_episodes; the latter also if evaluate.kl_efficiency is below 0.5 (noise)",
        default=0.5,
        ge=0,
        le=1,
        description="Smallest lower bound (95%) of the win rate against SFT.",
    ),
    Threshold(
        "evaluate.win_rate_champion_low",
        ">=",
        "champion_win_rate",
        "win rate against the champion",
        "Win rate against the champion (lower bound, as above); the first round has none. A policy "
        "need not beat the champion, but must not lose. With 88 prompts the interval is +-0.06: "
        "the lower bound of an equally good policy is 0.44 on average, and below 0.38 in one case "
        "of forty. With more prompts, raise the threshold.",
        "its policy may be worse than the champion",
        "Compare `champion` and `ppo` in rounds/{round}/evaluate/samples.jsonl. If the interval "
        "is wide, raise evaluate.samples_per_prompt or prepare.max_eval_prompts. Otherwise keep "
        "the champion and check this round's training data (reports/{round}/data.html), or raise "
        "ppo.total_episodes",
        optional=True,
        default=0.38,
        ge=0,
        le=1,
        description="Smallest lower bound (95%) of the win rate against the champion, the last "
        "promoted policy.",
    ),
    Threshold(
        "ppo.dangers",
        "<=",
        "dangers",
        "dangers that PPO's health monitor reported",
        'Number of findings with the level "danger" in the report of PPO\'s health monitor '
        "(docs/ppo.md), up to the rollout of the selected policy. Later dangers belong to "
        "discarded policies. The win rate does not show dangers: the jury may also prefer texts "
        "that all end in the same way.",
        "its health monitor reported a danger",
        "rounds/{round}/ppo/health.json names each danger, its update, its cause and what to "
        "change first. Read the rollouts of the updates around it in rounds/{round}/ppo/rollouts",
        default=0,
        ge=0,
        description="Most dangers that PPO's health monitor found up to the selected policy.",
    ),
    Threshold(
        "evaluate.ppo.kl_per_token",
        "<=",
        "max_kl_per_token",
        "KL from SFT, nats per token",
        "KL from SFT: nats per sequence, divided by the mean length of SFT's responses in tokens. "
        "The reward model was trained on texts like SFT's, and its scores are less reliable for "
        "others.",
        "its policy is too far from SFT",
        "Lower ppo.target_kl_per_token or ppo.max_kl_per_token, or raise ppo.kl_coef "
        "(rounds/{round}/evaluate/curves.csv has the KL of the checkpoints)",
        change=("ppo.target_kl_per_token", 0.7),
        default=0.6,
        gt=0,
        description="Largest KL from SFT, nats per token of SFT's responses.",
    ),
    Threshold(
        "evaluate.ppo.distinct_2",
        ">=",
        "distinct_2",
        "variety: distinct word pairs (distinct-2)",
        "Share of distinct word pairs, expected among 200 from the responses to all prompts. "
        "Texts by people have 0.95 to 0.97, whether they have 13 or 150 words. If half of each "
        "text is one template, the share is 0.50 at 13 words and 0.64 at 60 (docs/log.md).",
        "its policy writes one template for all prompts (mode collapse)",
        "See rounds/{round}/evaluate/samples.jsonl. Raise ppo.kl_coef or ppo.entropy_coef, or "
        "lower ppo.learning_rate",
        change=("ppo.kl_coef", 2),
        default=0.7,
        ge=0,
        le=1,
        description="Smallest expected share of distinct 2-grams among 200 across prompts.",
    ),
    Threshold(
        "evaluate.ppo.repetition_3 - evaluate.sft.repetition_3",
        "<=",
        "repetition_rise",
        "repeated 3-grams: policy minus SFT",
        "Share of 3-grams that occurred earlier in the same text: the policy's minus SFT's.",
        "its policy's texts repeat themselves",
        "See rounds/{round}/evaluate/samples.jsonl. Raise ppo.kl_coef, or lower "
        "ppo.learning_rate or ppo.response_length",
        change=("ppo.kl_coef", 2),
        default=0.05,
        ge=0,
        description="Largest rise of the share of repeated 3-grams over SFT's.",
    ),
    Threshold(
        "evaluate.sft.eos_rate - evaluate.ppo.eos_rate",
        "<=",
        "eos_fall",
        "share of texts that end: SFT minus policy",
        "Share of responses that end within ppo.response_length: SFT's minus the policy's. With 88 "
        "prompts and 2 samples each, 0.1 is two standard errors. On the default run, the metric is "
        "-0.32 to -0.12 for PPO on three seeds, and 0.37 to 0.48 for DPO's own loss on whole "
        "texts. The judges do not notice that a text was cut off.",
        "its policy's responses do not end",
        "Raise ppo.missing_eos_penalty. DPO has no such penalty: raise the weight of its loss "
        "`sft` (dpo.loss_weights; docs/algorithms.md). If you want longer texts, raise "
        "ppo.response_length",
        change=("ppo.missing_eos_penalty", 2),
        default=0.1,
        ge=0,
        le=1,
        description="Largest amount by which the share of ended responses is below SFT's.",
    ),
    Threshold(
        "replay.regressed",
        "<=",
        "regressed",
        "repaired badcases that fail again",
        "Number of repaired badcases (docs/badcases.md) that fail again: all of the policy's "
        "replay.tries new responses fail, or the reward model prefers the bad response to the "
        "better answer.",
        "badcases that were repaired fail again",
        "`rondo badcases list --state regressed` lists them. Check whether this round's data "
        "contain the rows that were made from these badcases: replay.max_share can leave rows "
        "out (see reports/{round}/data.html). Raise reward.continue_epochs or "
        "sft.continue_epochs",
        default=0,
        ge=0,
        description="Most badcases that were repaired before and fail again.",
    ),
    Threshold(
        "capability.worst_fall",
        "<=",
        "slice_fall",
        "drop against SFT in the worst slice",
        "Share of correct results: SFT minus policy, in the slice or task with the largest drop; "
        "upper bound of the paired 95% interval of Bonett and Price (2012). Slices are the prompts "
        "in slices/, tasks those of capability.tasks. The reward model was not trained on either, "
        "so PPO can make the policy worse at them. Few prompts give a wide interval: a slice with "
        "fewer than 26 prompts never passes, even if both models agree everywhere.",
        "the policy is worse than SFT in a slice or task that it must keep, or the slice has too "
        "few prompts to show that it is not",
        "`worst` in rounds/{round}/capability/metrics.json names the slice or task; "
        "samples.jsonl in the same folder has the answers of both models. If the interval is "
        "wide, add prompts. Otherwise raise ppo.kl_coef, or add similar prompts and pairs (not "
        "these) to your training data",
        optional=True,
        default=0.1,
        ge=0,
        le=1,
        description="Largest loss against SFT in any slice or task: upper bound (95%).",
    ),
    Threshold(
        "evaluate.human_nll_rise",
        "<=",
        "human_nll_rise",
        "rise of the loss on human texts, nats per token",
        "Loss on held-out human texts: policy minus SFT, in nats per token. On two machines, "
        "the metric is 0.37 to 0.59 in the rounds of the default run. A rise of 1 nat makes each "
        "token of human text 2.7 times less likely. The threshold is above the gain of SFT over "
        "the base model (0.63).",
        "its policy has forgotten how people write",
        "Raise ppo.kl_coef, or lower ppo.learning_rate or ppo.total_episodes",
        change=("ppo.kl_coef", 2),
        optional=True,
        default=1.0,
        ge=0,
        description="Largest rise over SFT of the loss on held-out human texts, nats per token.",
    ),
)
