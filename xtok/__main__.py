"""`python -m xtok` is the command line."""

from xtok.cli import program

if __name__ == "__main__":
    program()
