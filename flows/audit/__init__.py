"""audit: is this reward model, function or judge good enough to be optimised against, whoever made
it?

`subjects` turns what the user names into something that scores or compares texts, `measure` makes
the metrics of the reward model's gate from pairs, `verdict` compares them with the gate's
thresholds and writes the results.
"""
