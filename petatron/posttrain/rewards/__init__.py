"""What answers are rewarded for: rules about their text, and functions of a user's own in processes with a time limit."""
