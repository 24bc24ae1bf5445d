"""The parts of `petatron quickstart`: its corpus, its stages, and how the result is judged."""
