"""What `petatron bench serve` measures with: a server's process, HTTP clients."""
