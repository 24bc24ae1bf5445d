"""The parts of `petatron quickstart`: its corpus, its stages, and the evaluation of the result."""
