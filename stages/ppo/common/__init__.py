"""Shared by PPO and its alternatives: episodes, rewards, reference, health, policy selection."""

# Responses per prompt of the scaled policies, whose KL decides the selected policy's scale, and of
# SFT, whose length is the unit of the target KL. With one, the standard error of either on 128
# prompts is 4%.
SCALING_SAMPLES = 4
