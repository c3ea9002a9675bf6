"""battery: does this reward model deserve to be optimised against?

`measures` are numbers from scores, `probes` corrupts texts, `mined` finds phrases that high scores go with, `trials` tries
them on a reward model.
"""
