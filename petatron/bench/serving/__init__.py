"""What `petatron bench serve` measures with: a checkpoint of random weights, a server's process, HTTP clients."""
