"""One module per bench of `petatron bench`, and what they share: timing, the machine, peers, reports."""
