"""Triton implementations of the row kernels of `kernels/attention`."""
