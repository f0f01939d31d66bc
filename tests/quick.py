"""Compiling less: options with which XLA compiles a graph for a CPU in a third of the time.

LLVM optimizes nothing, and kernels come from XLA's older emitters. The bits are not those of the released
options, which modules with the mark `released_code` have.
"""

import os

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
# name, for processes that a test starts, the folder of the session's executables, and that they compile quickly
FOLDER, MODE = "TESTS_EXECUTABLES", "TESTS_COMPILE_QUICKLY"


def options() -> dict[str, bool | int]:
    """What this process compiles with beside the released options."""
    return QUICK if MODE in os.environ else {}
