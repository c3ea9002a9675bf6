"""Algorithms that do not train on the policy's own responses, update by update: DPO and best-of-n,
by TRL's trainers, with the validation and the outputs of the online ones.
"""
