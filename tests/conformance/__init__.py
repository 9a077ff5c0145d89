"""The contract of a backend, as tests; `harness.HARNESSES` lists the backends that it binds."""
