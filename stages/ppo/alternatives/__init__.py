"""What makes a policy of the SFT model in place of PPO: TRL's trainers, with PPO's prompts,
rewards, validation and outputs.
"""
