"""Exact and near duplicates, and leaks of held-out texts into training texts."""
