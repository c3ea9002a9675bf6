"""evaluate: base, SFT, PPO's checkpoints, the policy and the champion on the frozen prompts.

`evaluator` samples and scores one model, `results` compares models by the jury, `comparability`
identifies the evaluation's settings, `overoptimisation` fits the judge's score against KL,
`reproduce` repeats the policy's evaluation in a fresh process. `checkpoint` is a program of its
own.
"""
