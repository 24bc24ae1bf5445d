"""Evaluation: token sequences scored in any layout, and tasks that are built on the scores."""
