"""`python -m capsroute`, which is what torchrun needs."""

from capsroute.cli import main

if __name__ == "__main__":
    main()
