"""evaluate: base, SFT, checkpoints, policy and champion on the frozen evaluation prompts, compared
by the jury.
"""
