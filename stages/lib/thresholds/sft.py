"""Thresholds of the SFT gate."""

from stages.lib.thresholds.form import Threshold

SFT = (
    Threshold(
        "sft.loss_before - sft.loss_after",
        ">=",
        "loss_drop",
        "drop of the loss on held-out demonstrations, nats per token",
        "Loss on held-out demonstrations: base model minus SFT, in nats per token. The threshold "
        "is a third of the drop on the default run (0.6). A smaller drop can be noise, because the "
        "texts are few, or the learning rate is too low.",
        "it learnt too little",
        "Raise sft.num_train_epochs or sft.learning_rate, or add demonstrations. If the base model "
        "knows such texts already, the loss cannot fall: lower gates.sft.loss_drop",
        change=("sft.num_train_epochs", 2),
        below_zero=("its loss on held-out demonstrations rose", ("sft.learning_rate", 0.5)),
        default=0.2,
        description="Smallest drop of held-out loss from the base model, nats per token.",
    ),
    Threshold(
        "sft.net_win_rate_low",
        ">=",
        "net_win_rate",
        "wins minus losses against the base model",
        "Share of SFT's responses that the primary judge (the first of evaluate.judges) prefers to "
        "the base model's, minus the share that it finds worse; lower bound of the paired 95% "
        "interval over prompts. Both models answer the frozen prompts sft.samples_per_prompt times "
        "with the same random numbers. SFT need not be better than the base model, but must not be "
        "worse: with 88 prompts and 4 responses, an equally good SFT model has a lower bound above "
        "-0.17 in 39 of 40 cases. Not measured (null) with the judge `apart`, which is trained "
        "after SFT.",
        "its responses may be worse than those of the base model",
        "Compare both in rounds/{round}/sft/samples.jsonl. Are the demonstrations "
        "(reports/{round}/data.html) texts that you want? If they are, name a judge that fits "
        "your task in evaluate.judges",
        optional=True,
        default=-0.2,
        ge=-1,
        le=1,
        description="Smallest lower bound (95%) of wins less losses of SFT against the base "
        "model, as shares, by the primary judge on fixed prompts.",
    ),
    Threshold(
        "sft.eos_rate_demonstrations - sft.eos_rate",
        "<=",
        "eos_gap",
        "share of texts that end: demonstrations minus SFT",
        "Share of held-out demonstrations that fit into ppo.response_length tokens, minus the "
        "share of responses that end within this limit. If responses do not end, PPO trains on "
        "cut-off texts, which the reward model has never seen.",
        "its responses do not end, so PPO would learn on cut-off texts",
        "Raise sft.num_train_epochs or ppo.response_length; check that demonstrations fit into "
        "sft.max_length (metrics.json: overlong)",
        change=("sft.num_train_epochs", 2),
        default=0.4,
        ge=0,
        le=1,
        description="Largest amount by which the share of ended responses is below the "
        "demonstrations'.",
    ),
    Threshold(
        "sft.length_ratio",
        ">=",
        "length_low",
        "length of responses, as a multiple of the demonstrations'",
        "Mean length of responses divided by that of held-out demonstrations, in tokens, both cut "
        "at ppo.response_length. With 88 prompts, a ratio of 0.5 is far outside the sampling "
        "noise.",
        "its responses are far shorter than the demonstrations",
        "Look for empty or cut demonstrations in reports/{round}/data.html, or raise "
        "sft.max_length",
        default=0.5,
        ge=0,
        description="Smallest mean length of responses, as a multiple of the demonstrations'.",
    ),
    Threshold(
        "sft.length_ratio",
        "<=",
        "length_high",
        "length of responses, as a multiple of the demonstrations'",
        "Upper limit of the ratio in the row above.",
        "its responses are far longer than the demonstrations: it has not learnt when to stop",
        "Raise sft.num_train_epochs",
        change=("sft.num_train_epochs", 2),
        default=1.5,
        gt=0,
        description="Largest mean length of responses, as a multiple of the demonstrations'.",
    ),
    Threshold(
        "sft.repetition_3 - sft.repetition_3_demonstrations",
        "<=",
        "repetition_rise",
        "repeated 3-grams: SFT minus demonstrations",
        "Share of 3-grams that occurred earlier in the same text: responses minus held-out "
        "demonstrations. The threshold is one 3-gram in twenty.",
        "it repeats phrases",
        "Lower sft.learning_rate, add demonstrations, or look for repeated texts in "
        "reports/{round}/data.html",
        change=("sft.learning_rate", 0.5),
        default=0.05,
        ge=0,
        description="Largest rise of the share of repeated 3-grams over the demonstrations'.",
    ),
    Threshold(
        "sft.memorised - sft.memorised_demonstrations",
        "<=",
        "memorised",
        "texts copied from training: SFT minus held-out",
        "Share of texts that contain 8 consecutive words of one training text: responses minus "
        "held-out demonstrations, which share some phrases with training texts although nothing "
        "was memorised.",
        "it recites training texts",
        "Lower sft.num_train_epochs or sft.lora.r, or add demonstrations. Look for near "
        "duplicates in reports/{round}/data.html, and lower prepare.near_duplicate if there are "
        "any",
        change=("sft.num_train_epochs", 0.5),
        default=0.05,
        ge=0,
        le=1,
        description="Largest share of responses that copy 8 words in a row, minus that of held-"
        "out texts.",
    ),
)
