"""Run a script with Accelerate's FSDP on CPUs, which Accelerate itself allows on accelerators only.

A process of `test_many_gpus.py`. The list of devices is the only thing that is replaced.
"""

import runpy
import sys
from types import SimpleNamespace
from typing import Any

from accelerate import state  # type: ignore[import-untyped]

kinds: dict[str, Any] = {kind.name: kind for kind in state.DistributedType}
state.DistributedType = SimpleNamespace(**kinds | {"MULTI_NEURON": kinds["MULTI_CPU"]})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
