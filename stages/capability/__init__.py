"""capability: which abilities did the policy lose against SFT?

`measure` samples SFT and policy on the prompts of slices/ (stages/lib/data/slices.py), recognises
refusals, runs lm-eval tasks through `lm_eval_tasks`, and computes how much worse the policy is.
"""
