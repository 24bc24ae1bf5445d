"""Opens models, whatever they are on disk: a run, one of its steps, a Hugging Face folder or name, what Megatron-LM saved."""
