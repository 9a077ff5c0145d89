"""What does not fit into memory is a MemoryError that names the argument, and never the end of the process."""

import subprocess
import sys

import pytest

pytest.importorskip("resource")

SCRIPT = """
import resource
import numpy as np
import kvblocks as kv

tokens = np.zeros(2**23, np.int32)
manager = kv.BlockManager(1024, 1)
# As a long prompt has them, 2**23 digests take 256 MB; its copy, of 32 MB, fits.
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 200 * 2**20, -1))
for call in (lambda: kv.block_hashes(tokens, 1, seed=0), lambda: manager.prepare(tokens)):
    try:
        call()
    except MemoryError as error:
        print(error)
print(len(kv.block_hashes(tokens, 16, seed=0)), len(manager.prepare(tokens[:4096])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the process looks its size up in /proc")
def test_digests_that_do_not_fit_are_a_memory_error() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    problem = "tokens has 8388608 entries: no memory for what follows from them, 268435456 bytes"
    assert result.stdout.splitlines() == [problem, problem, "524288 4096"]
    assert (result.returncode, result.stderr) == (0, "")
