"""`python -m fusedtp` is the `fusedtp` command."""

from .bench.cli import main

if __name__ == "__main__":
    main()
