"""Adapts the model of a preset, a file or a folder to what a user types: what typed flags make meaningless is dropped, patterns of layers
are cut to another number of layers, and `--toy` shrinks all sizes."""
