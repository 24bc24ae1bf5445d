"""Petatron's models inside other programs: each folder registers them with the library that it is named after, when it is imported."""
