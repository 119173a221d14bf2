"""`xtok env`."""

import xtok
from xtok.cli.command import command, show
from xtok.cli.options import JSON
from xtok.report.env import print_env


@command
def env(*, json: bool = JSON) -> None:
    """Show what a bug report needs: versions, the machine, settings; no secrets."""
    show(xtok.env(), print_env, json=json)
