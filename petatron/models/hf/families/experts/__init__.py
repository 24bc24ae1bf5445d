"""Families whose layers with experts are of a kind of their own."""
