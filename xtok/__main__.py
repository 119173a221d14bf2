"""Entry point of `xtok` and `python -m xtok`."""

import os
import signal
import sys


def program() -> None:
    """Run the command line and exit. Ctrl-C also exits during the imports."""
    try:
        from xtok.cli import program as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(130)
    finally:  # The work is done. A Python handler would print a traceback during shutdown.
        _drop_unwritable()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def _drop_unwritable() -> None:
    """Discard buffered output that stderr, or stdout after an error, cannot write.

    Otherwise, Python 3.14 retries at shutdown, reports the failure, and exits with 120.
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
