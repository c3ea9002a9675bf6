"""Shared by PPO and its alternatives: episodes, rewards, reference, health, policy selection."""
