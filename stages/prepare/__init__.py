"""prepare: read, normalise and check the data, drop duplicates, split by prompt, and add the
previous round's replay.
"""
