"""Adapters: small trainable parameters beside frozen weights (LoRA, rsLoRA, DoRA, IA3)."""
