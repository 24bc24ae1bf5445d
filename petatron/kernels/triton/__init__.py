"""Triton twins of the plain kernels: `triton/x.py` has functions of `kernels/x.py`, under the same names and signatures.

Where a plain module gathers its functions in a record, `REFERENCE`, the twin's is `TRITON`.

Nothing here is imported unless the registry picks it, since Triton is optional. Arithmetic is in float32 whatever the
tensors hold; float64 is left to the plain versions.
"""
