"""Judges that compare two responses to a prompt, alone and as a jury.

None of them is the reward model that PPO optimises, so they can detect reward hacking.
"""
