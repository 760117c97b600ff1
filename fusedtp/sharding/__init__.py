"""Plan sharded matmuls in pure Python: parse the notation, and find the collectives that a matmul needs."""
