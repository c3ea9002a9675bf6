"""Language models: loading, adapters, packed forward passes, sampling, log-probabilities, scores.

Notation of shapes: B rows (a prompt with its response), T tokens of the longest response, V
vocabulary, H hidden size, L tokens of the longest row, M tokens of all rows, N response tokens of
all rows.
"""
