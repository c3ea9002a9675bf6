"""Language models: loading, adapters, packed forward passes, sampling, log-probabilities, reward
scores, saving.
"""
