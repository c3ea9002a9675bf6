"""annotate: who says which of two responses is better, people or a judge (AI labels, RLAIF: Lee et
al. 2023).

`judged` draws SFT responses and has them judged, `judging` are the judges, `ranking` makes a pair
of comparisons, `agreement` says how far the judge can be trusted.
"""
