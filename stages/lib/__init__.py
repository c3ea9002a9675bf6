"""What two or more stages share. A room imports only those before it: core, metrics, data, dedup,
lm, training, judging.
"""
