"""PPO's trainer: the models, one update, the loop over updates."""
