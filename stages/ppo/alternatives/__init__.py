"""Algorithms that train the policy in place of PPO: TRL's trainers, with PPO's prompts, rewards,
validation and outputs.
"""

# Number of responses, at most, that describe an alternative's policy before and after training.
NUM_DESCRIBED_SAMPLES = 256
