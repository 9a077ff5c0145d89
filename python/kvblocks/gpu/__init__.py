"""The kernels on a GPU for engines that bring their own tensors.

Imports nothing that a machine without a GPU lacks; CuPy and torch are imported when a call needs them.
"""

from kvblocks.gpu.readiness import Readiness, check

__all__ = ["Readiness", "check"]
