"""annotate: label preference pairs, by people (the data's own labels) or by a judge (AI labels,
RLAIF: Lee et al. 2023).

`ai_labels` samples SFT responses, has a judge compare them and measures the judge against people;
`ranking` chooses a pair from these comparisons.
"""
