"""replay: find what the policy and the reward model got wrong, make training rows against it, and try the last round's failures again.

`sampling` draws and scores, `mine` finds badcases by cause, `exploits` finds what the reward model overpays, `repair` makes
the next round's rows, `retry` tells what this round repaired.
"""
