"""`python -m rlkernel`, where the console script is not on the path."""

from rlkernel.cli import main

if __name__ == "__main__":
    main()
