"""Ranks that draw while others train: what they do, and how ranks that train see them."""
