"""The Hadamard rotation of rows: outlier channels are spread over a row before it is quantised.

Owns `rotate`. Imports NumPy only.
Invariant: the matrix is orthonormal and symmetric, so `rotate` undoes itself, and products of rotated rows are those of
the rows: q and k rotated alike have the same logits, and an output of rotated values is unrotated once.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray


def rotate(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [.., dim] times the Hadamard matrix, as a new array.

    A dim that is no power of two is cut into the largest parts that are one. O(rows * dim * part).
    """
    dim = rows.shape[-1]
    part = dim & -dim
    turned: NDArray[np.float32] = rows.reshape(-1, part) @ _hadamard(part)
    return turned.reshape(rows.shape)


@cache
def _hadamard(size: int) -> NDArray[np.float32]:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(size), np.float32)
