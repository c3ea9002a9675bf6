"""PPO-RLHF: the trainer. `functional` is the mathematics, `roles` the models, `trainer` one update,
`__main__` the run.
"""
