"""The forward pass of a Llama-family language model in float32 NumPy.

Owns: the arithmetic between token ids and logits, and nothing about caches: attention is a callable that the
caller gives, so the same pass runs over a paged cache, a contiguous one, or anything else. May import: NumPy.
Invariant: a row of the result depends on that row's token, its position, and what `attention` returns for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
# (layer, q [t, num_heads, head_dim], k and v [t, num_kv_heads, head_dim]) -> [t, num_heads, head_dim]
Attention = Callable[[int, F32, F32, F32], F32]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; `context_length` in tokens."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    norm_eps: float

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor, in the order in which they are stored.

        The embedding is [vocab_size, hidden_dim], all other matrices are [in, out]: BLAS multiplies a few rows
        by them faster than by [out, in].
        """
        d, heads = self.hidden_dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (self.vocab_size, d)}
        for i in range(self.num_layers):
            shapes[f"{i}.attn_norm"] = (d,)
            shapes[f"{i}.attn_qkv"] = (d, heads)
            shapes[f"{i}.attn_output"] = (self.num_heads * self.head_dim, d)
            shapes[f"{i}.ffn_norm"] = (d,)
            shapes[f"{i}.ffn_gate_up"] = (d, 2 * self.ffn_dim)
            shapes[f"{i}.ffn_down"] = (self.ffn_dim, d)
        shapes["output_norm"] = (d,)
        return shapes


class Llama:
    """A decoder of the Llama family with tied embeddings; it keeps views of `tensors` and copies nothing."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, F32]) -> None:
        check_tensors(config, tensors)
        self.config = config
        self._tensors = tensors
        pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
        self._inv_freq = config.rope_theta ** -(pairs / config.head_dim)

    def forward(
        self, ids: Sequence[int] | NDArray[np.integer], positions: NDArray[np.integer], attention: Attention
    ) -> F32:
        """Run t tokens, of any number of sequences, through all layers; the hidden rows [t, hidden_dim].

        ids and positions: [t]. `attention` is called once a layer, in order, and is the only thing that knows
        which rows belong together.
        """
        c, w = self.config, self._tensors
        cos, sin = turns(positions, self._inv_freq)
        split = (c.num_heads, c.num_heads + c.num_kv_heads)

        x: F32 = w["token_embd"][np.asarray(ids)]
        for layer in range(c.num_layers):
            qkv = self._norm(x, w[f"{layer}.attn_norm"]) @ w[f"{layer}.attn_qkv"]
            q, k, v = np.split(qkv.reshape(len(x), -1, c.head_dim), split, axis=1)
            out = attention(layer, _rotate(q, cos, sin), _rotate(k, cos, sin), np.ascontiguousarray(v))
            x = x + out.reshape(len(x), -1) @ w[f"{layer}.attn_output"]
            gate_up = self._norm(x, w[f"{layer}.ffn_norm"]) @ w[f"{layer}.ffn_gate_up"]
            gate, up = np.split(gate_up, 2, axis=1)
            x = x + (_silu(gate) * up) @ w[f"{layer}.ffn_down"]
        return x

    def logits(self, hidden: F32) -> F32:
        """Logits [r, vocab_size] of hidden rows [r, hidden_dim]: pass only the rows that are sampled from."""
        normed = self._norm(hidden, self._tensors["output_norm"])
        return np.asarray((self._tensors["token_embd"] @ normed.T).T)

    def _norm(self, x: F32, weight: F32) -> F32:
        return rms_norm(x, weight, self.config.norm_eps)


class Shape(Protocol):
    """What the config of any decoder says of its tensors."""

    @property
    def hidden_dim(self) -> int:
        """Elements of a hidden row."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor."""


def check_tensors(config: Shape, tensors: Mapping[str, F32]) -> None:
    """Raise ValueError where a tensor has another shape than the config says."""
    for name, shape in config.tensor_shapes().items():
        if tensors[name].shape != shape:
            raise ValueError(f"tensor {name} has shape {tensors[name].shape}, expected {shape}")


def random_tensors(config: Shape, seed: int) -> dict[str, F32]:
    """Weights of a random model for quick tests, scaled so that attention matters to what it generates."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        if len(shape) == 1:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            scale = 1.5 / np.sqrt(config.hidden_dim)
            tensors[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return tensors


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Rows of x, each with a mean square of 1, times the weight."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + np.float32(eps)) * weight)


def turns(positions: NDArray[np.integer], inv_freq: NDArray[np.float64]) -> tuple[F32, F32]:
    """Cosines and sines [t, 1, head_dim / 2] by which rotary position embedding turns the pairs of a head."""
    angles = np.asarray(positions, dtype=np.float64)[:, None, None] * inv_freq
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary position embedding over interleaved pairs (0, 1), (2, 3), ..., as GGUF lays out Q and K."""
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def _silu(x: F32) -> F32:
    # x * sigmoid(x), with tanh because exp(-x) overflows.
    return np.asarray(x * (np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)))
