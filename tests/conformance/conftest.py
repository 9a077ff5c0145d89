"""Fixtures of the contract suite."""

import os
from pathlib import Path

import pytest

from conformance.harness import PARAMS, Harness


@pytest.fixture(params=PARAMS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each backend in turn."""
    return request.param


@pytest.fixture
def checks_values(harness: Harness) -> None:
    """Skip where wrong values in index arrays are reported on the device, not raised."""
    if not harness.checks_values:
        pytest.skip(f"{harness.name} checks the values of index arrays on the device")


@pytest.fixture
def host_arrays(harness: Harness) -> None:
    """Skip where arrays are not NumPy's, which alone can be read-only, misaligned or compared by address."""
    if harness.marker == "gpu":
        pytest.skip(f"{harness.name} takes device arrays")


@pytest.fixture
def real_kv() -> Path:
    """Folder with recorded queries, keys and values of a real model."""
    folder = os.environ.get("KVBLOCKS_REAL_KV")
    if folder is None:
        pytest.skip("KVBLOCKS_REAL_KV does not name a folder with smollm2_qkv_512.npz")
    return Path(folder)
