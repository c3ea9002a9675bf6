"""The policy stage: PPO-RLHF (`trainer`), other algorithms (`alternatives`), and their shared parts
(`common`).
"""
