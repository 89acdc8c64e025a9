"""`python -m normkit`, and `torchrun -m normkit`: the program `normkit`."""

from normkit.cli.app import main

if __name__ == "__main__":
    main()
