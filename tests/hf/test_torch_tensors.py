"""The cpu backend over tensors of PyTorch: no copies, and the results of the same values in NumPy."""

import importlib.util

import numpy as np
import pytest

from kvblocks.backends.cpu import CpuBackend
from kvblocks.backends.tensors import as_numpy
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_step_over_tensors(name: str) -> None:
    import torch

    dtype = getattr(torch, name)
    torch.manual_seed(0)
    k, v = torch.randn(2, 40, 2, 64).to(dtype)
    q, pool = torch.randn(2, 4, 64).to(dtype), torch.zeros(2, 4, 16, 2, 64, dtype=dtype)
    table, lens, starts = (
        torch.tensor([[2, 1, 3]]).int(),
        torch.tensor([40]).int(),
        torch.tensor([0, 2]).int(),
    )
    slots = (table[0].long()[:, None] * 16 + torch.arange(16)).flatten()[:40]
    backend = CpuBackend()

    # Storage that torch owns, written in place.
    cache = LayerCache(as_numpy(pool[0]), as_numpy(pool[1]), name, 16, "NHD")
    backend.write(cache, k, v, slots)
    assert torch.equal(pool[0].flatten(0, 1)[slots], k)
    out = backend.attend(cache, q, table, lens, starts)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == dtype

    (twin,) = backend.allocate(CacheConfig(1, 2, 64, dtype=name), 4)
    arrays = [as_numpy(tensor) for tensor in (k, v, slots, q, table, lens, starts)]
    backend.write(twin, *arrays[:3])
    np.testing.assert_array_equal(as_numpy(out), backend.attend(twin, *arrays[3:]))

    given, lse = torch.empty_like(out), torch.empty(2, 4)
    assert backend.attend(cache, q, table, lens, starts, out=given, lse=lse) is given
    assert torch.equal(given, out)
    grouped = (tensor.transpose(0, 1).float().repeat_interleave(2, 0) for tensor in (k, v))
    mask = torch.ones(2, 40, dtype=torch.bool).tril(38)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).float(), *grouped, attn_mask=mask
    )
    torch.testing.assert_close(given.float(), expected.transpose(0, 1), rtol=2e-2, atol=2e-2)


def test_an_array_is_the_tensor_s_memory() -> None:
    import torch

    tensor = torch.zeros(3, dtype=torch.bfloat16)
    as_numpy(tensor)[1] = 0x3F80
    assert tensor.tolist() == [0, 1, 0]
    assert as_numpy(7) == 7
