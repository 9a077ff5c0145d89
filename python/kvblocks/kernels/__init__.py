"""The CUDA kernels as data: their sources, their instances, their parameters, and what compiles and launches them.

Imports NumPy and the standard library only; a launcher imports what it launches with.
"""
