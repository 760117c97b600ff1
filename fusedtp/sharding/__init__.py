"""From a line of notation to steps, in pure Python: what is split, how long parts are, what a matmul must send."""
