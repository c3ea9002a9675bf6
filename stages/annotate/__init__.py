"""annotate: label preference pairs, by people (the data's own labels) or by a judge (AI labels,
RLAIF: Lee et al. 2023).

`ai_labels` has a judge compare SFT's responses, `revisions` has a language model revise them;
`inputs` samples the responses and measures the judge against people.
"""
