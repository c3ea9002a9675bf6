"""What PPO and its alternatives share: episodes, rewards, reference model, health, policy
selection.
"""
