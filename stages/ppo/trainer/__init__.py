"""PPO's trainer: roles, one update, the loop over updates, resume."""
