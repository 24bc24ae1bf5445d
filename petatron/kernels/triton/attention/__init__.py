"""Twins of what `kernels/attention` does outside its products."""
