"""replay: find failures of the policy and the reward model, make training rows against them, and
retest the failures of earlier rounds.

`inputs` reads, `sampler` samples and scores, `mining` finds badcases (`badcases`) by cause,
`exploits` finds endings that the reward model overpays, `training_rows` makes the next round's rows
from the jury's best answers, `retest` measures what was repaired.
"""
