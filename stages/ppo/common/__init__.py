"""Shared by PPO and its alternatives: episodes, rewards, reference, health, policy selection."""

# Responses per prompt whose KL decides the scale of the selected policy. With one, the KL's
# standard error on 128 prompts is 4%.
SCALING_SAMPLES = 4
