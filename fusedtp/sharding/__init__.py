"""From a line of notation to steps, in pure Python: how dims are split, and the collectives that a matmul needs."""
