"""What makes a policy of the SFT model in place of PPO: TRL's trainers, with PPO's prompts,
rewards, validation and outputs.
"""

NUM_DESCRIBED_SAMPLES = (
    256  # responses, at most, by which the alternatives to PPO are described before and after
)
