"""Random configurations of every family, as published models vary, against transformers."""
