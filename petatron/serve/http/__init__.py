"""HTTP routes. Everything here needs the extra `serve`, and imports it at the top; `cli/serve.py` alone loads it."""
