"""Tensors of PyTorch as NumPy arrays and back, on the same memory.

Owns `as_numpy` and `like`. Imports NumPy and the standard library: a tensor can only come from a torch that somebody
else has imported.
Invariant: nothing is copied.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_numpy(value: Any) -> Any:
    """A CPU tensor as an array on the same memory, bfloat16 as its bits in uint16; anything else as it is.

    Raises TypeError for a tensor on another device, or of a dtype that NumPy has not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu":
        raise TypeError(f"a tensor on {value.device}: this backend takes those on the CPU")
    tensor = value.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def like(array: NDArray[Any], given: Any) -> Any:
    """An array as a tensor on the same memory if `given` is a tensor, uint16 as bfloat16; else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(given, torch.Tensor):
        return array
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
