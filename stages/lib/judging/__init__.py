"""Judges that compare two responses, alone and as a jury. None is the reward model that PPO
optimises.
"""
