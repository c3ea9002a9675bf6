"""battery: does this reward model deserve to be optimised against?

`answers` are the SFT model's, `trials` puts corrupted texts (stages/lib/data/corruptions.py) and
endings before a reward model, `mined` finds phrases that high scores go with, `measures` are
numbers from scores, `report` is what a reader looks at.
"""
