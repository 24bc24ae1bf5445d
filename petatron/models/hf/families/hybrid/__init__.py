"""Families of Mamba-2 and of hybrids with attention, MLPs and experts."""
