"""reward: train the reward model on preference pairs; calibrate, save and reload it."""
