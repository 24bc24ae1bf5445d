"""What learns from answers that the model draws itself: prompts, rollouts, rewards, and the loader that feeds them to training."""
