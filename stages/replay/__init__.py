"""replay: find failures of the policy and the reward model, make training rows against them, and
retest the failures of earlier rounds.

`inputs` and `user_reports` read, `sampler` samples and scores, `policy_samples` collects what the
policy wrote, `mining` finds badcases (`badcases`) by cause, `exploits` finds endings that the
reward model overpays, `better_answers` picks the jury's best answers, `training_rows` makes the
next round's rows, `retest` and `progress` measure what was repaired.
"""
