"""The backends that cases run on."""

import pytest

import kvblocks as kv
from kernels.emulator import emulated_backend
from kvblocks.backends import get_backend


@pytest.fixture(params=["numpy", "cpu", pytest.param("emulated", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> kv.Backend:
    """The two of the CPU, and the CUDA kernels run on it."""
    return emulated_backend() if request.param == "emulated" else get_backend(request.param)
