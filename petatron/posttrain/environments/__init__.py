"""What answers to answers: environments of several turns, in processes of their own or behind HTTP, and tools that a model calls."""
