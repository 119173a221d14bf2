"""`python -m xtok` is the command line."""

from xtok.cli import main

if __name__ == "__main__":
    main()
