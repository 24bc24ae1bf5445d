"""Triton kernels run in its CPU interpreter here, which has to be asked for before a kernel is defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
