"""Triton implementations of the reference kernels: `triton/x.py` has functions of `kernels/x.py`, with the same names and signatures.

Where a reference module has a record of its functions, `REFERENCE`, the Triton one is `TRITON`.

Nothing here is imported unless the registry chooses it, since Triton is optional. Arithmetic is in float32 whatever the tensors
hold; float64 is left to the reference.
"""
