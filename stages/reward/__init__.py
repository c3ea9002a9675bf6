"""reward: train the reward model on preference pairs, calibrate and measure it."""
