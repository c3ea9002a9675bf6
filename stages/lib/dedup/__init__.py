"""Exact and near duplicates, and overlap of training with held-out texts."""
