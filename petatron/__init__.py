"""Petatron: train language models of any size on any number of devices, and prove that the layout does not matter."""

__version__ = "0.1.0"
