"""Opens models on disk, whatever their format: a run, one of its steps, a Hugging Face folder or hub name, a Megatron checkpoint."""
