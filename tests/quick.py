"""Compiling less: options with which XLA compiles a graph for a CPU in a third of the time.

LLVM optimizes nothing, and kernels come from XLA's older emitters. The bits are not those of the released
options, which modules with the mark `released_code` have.
"""

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
# names the folder of the session's executables to processes that a test starts
FOLDER = "TESTS_EXECUTABLES"
