"""Triton twins of the plain kernels, with the same names and signatures.

Nothing here is imported unless the registry picks it, since Triton is optional. Arithmetic is in float32 whatever the
tensors hold; float64 is left to the plain versions.
"""
