"""replay: find what the policy and the reward model got wrong, make training rows against it, and
try the last round's failures again.

`people` reads what people give, `sampling` draws and scores, `mine` finds badcases by cause,
`exploits` finds what the reward model overpays, `better` finds the jury's best answers, `repair`
makes the next round's rows, `retry` tells what this round repaired.
"""
