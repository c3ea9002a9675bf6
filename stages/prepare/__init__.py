"""prepare: load, normalise, audit, drop duplicates, split by prompt, merge the previous round's
replay.
"""
