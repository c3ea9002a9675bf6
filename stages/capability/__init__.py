"""capability: what the policy can do no more, or does that SFT did not.

`measure` asks SFT and policy both the prompts of slices/ (stages/lib/data/slices.py) and the tasks
of lm-eval, which `harness` runs; `refusals` knows an answer that refuses, `falls` how much worse
the policy is.
"""
