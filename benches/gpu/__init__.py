"""Measurements that need a GPU: `python -m benches.gpu.run` says how."""
