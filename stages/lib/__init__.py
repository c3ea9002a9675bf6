"""Code that two or more stages share.

A room imports only rooms before it in this list: core, metrics, data, dedup, lm, training, judging.
"""
