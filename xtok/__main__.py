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
        _drop_unwritable()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def _drop_unwritable() -> None:
    """Let go of lines that stderr, or after an error stdout, does not take.

    Python 3.14 would try again while it ends, print that it failed, and exit with 120.
    """
    error = sys.exc_info()[1]
    has_failed = isinstance(error, SystemExit) and error.code not in (None, 0)
    for stream in (sys.stderr, *([sys.stdout] if has_failed else [])):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    program()
