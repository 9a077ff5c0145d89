"""asv's benchmarks of what costs CPU time in an engine's step."""
