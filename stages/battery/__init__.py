"""battery: is this reward model good enough to be optimised against?

`metrics` turns scores into numbers, `best_of_n` samples from the SFT model and scores the samples,
`probes` scores corrupted or edited texts and texts with an appended ending or phrase, `report`
writes samples and tables for readers.
"""
