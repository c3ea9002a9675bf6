"""Prompts as text and tokens, splits, slices, corruptions, and the file format of rollouts."""
