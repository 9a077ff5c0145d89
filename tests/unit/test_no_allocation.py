"""A step allocates nothing, its arguments included: malloc is counted in a process of its own."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COUNTING = """
#include <stddef.h>
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *at, size_t size);
static _Thread_local long count;
long num_allocations(void) { return count; }
void *malloc(size_t size) { count++; return __libc_malloc(size); }
void *calloc(size_t number, size_t size) { count++; return __libc_calloc(number, size); }
void *realloc(void *at, size_t size) { count++; return __libc_realloc(at, size); }
"""

STEPS = """
import ctypes, gc
import numpy as np
import kvblocks as kv

count = ctypes.CDLL(None).num_allocations
count.restype = ctypes.c_long
manager = kv.BlockManager(4096, 16)
step = kv.Step(manager, max_seqs=64, max_tokens=8192, max_blocks_per_seq=64)
prompts = [manager.prepare(np.arange(50 + row, dtype=np.int32)) for row in range(64)]
before = count()
handles = np.array([manager.allocate(prompt).handle for prompt in prompts])
assert count() > before, "nothing is counted"
ones, ids = np.ones(64, np.int32), np.arange(64, dtype=np.int32)
lengths = np.arange(50, 114, dtype=np.int32)
step.schedule(handles, lengths)
manager.commit(handles, lengths)
gc.disable()
in_schedule = in_commit = num_changes = 0
for number in range(80):
    start = count()
    changed = step.schedule(handles, ones).num_changes
    middle = count()
    manager.commit(handles, ones, ids)
    end = count()
    if number >= 20:
        num_changes += changed
        in_schedule += middle - start
        in_commit += end - middle
assert num_changes > 200, "hardly a row has opened a block"
print(in_schedule, in_commit)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is replaced as glibc allows it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_step_allocates_nothing_for_its_arguments_and_answer(tmp_path: Path) -> None:
    source, library = tmp_path / "counting.c", tmp_path / "counting.so"
    source.write_text(COUNTING)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    run = [sys.executable, "-c", STEPS]
    environment = {"LD_PRELOAD": str(library)}
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout.split(), result.stderr) == (["0", "0"], "")
