"""Families of Mamba-2, of gated delta nets and of hybrids with attention, MLPs and experts."""
