"""`xtok` and `python -m xtok`: the command line."""

import os
import signal
import sys


def program() -> None:
    """Run the command line and end the process; an interrupt of its imports ends it, too."""
    try:
        from xtok.cli import program as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(130)
    finally:  # the work is done; while Python ends, a handler would show a traceback
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    program()
