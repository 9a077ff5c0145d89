"""An interpreter of PTX: what the device's compiler makes of the kernels, run on a CPU.

A second opinion on device_compat.cuh: the emulator runs the host's twins, and here runs the device's branch, its inline
assembly included, by the rules of the PTX ISA (version 9.0, docs.nvidia.com/cuda/parallel-thread-execution). One
direction of flow: program -> block -> (arithmetic | memory | collectives) -> launcher.
"""
