"""PPO by an engine that others made, as a job of a Ray cluster (docs/engines.md).

The engine runs in an environment of its own. Rondo writes its command and its prompts, follows its
metrics, and selects the policy among its checkpoints as after a PPO run of its own.
"""
