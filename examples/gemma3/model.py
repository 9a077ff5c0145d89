"""The forward pass of a Gemma 3 language model in float32 NumPy.

Owns: the arithmetic between token ids and logits, and nothing about caches: attention is a callable that the caller
gives. May import: NumPy, SmolLM2's model.
Invariant: a row of the result depends on that row's token, its position, and what `attention` returns for it.

What sets it apart from a Llama: a window on all layers but every sixth, with a rotary base of its own; norms of each
row of Q and K, and after attention and the feed-forward part, not before them only; GELU; an embedding that is scaled.
Source: Gemma 3 Technical Report, 2025 (arXiv:2503.19786).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from smollm2.model import F32, check_tensors, rms_norm, turns

# (layer, window in tokens or None, q [t, num_heads, head_dim], k and v [t, num_kv_heads, head_dim]) ->
# [t, num_heads, head_dim]
Attention: TypeAlias = Callable[[int, "int | None", F32, F32, F32], F32]


@dataclass(frozen=True)
class GemmaConfig:
    """The shape of a model; `context_length` and `window_tokens` in tokens.

    A layer sees the newest `window_tokens` keys, its own included; every `global_every`-th one sees all.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    window_tokens: int
    rope_theta: float
    norm_eps: float
    global_every: int = 6
    window_rope_theta: float = 1e4

    def window(self, layer: int) -> int | None:
        """Tokens that a layer sees; None: all."""
        return None if (layer + 1) % self.global_every == 0 else self.window_tokens

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor: the embedding is [vocab_size, hidden_dim], other matrices are [in, out].

        Norm weights are factors, as GGUF stores them: 1 added to those of the original checkpoint.
        """
        d, heads = self.hidden_dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (self.vocab_size, d)}
        for i in range(self.num_layers):
            shapes |= {
                f"{i}.attn_norm": (d,),
                f"{i}.attn_qkv": (d, heads),
                f"{i}.attn_q_norm": (self.head_dim,),
                f"{i}.attn_k_norm": (self.head_dim,),
                f"{i}.attn_output": (self.num_heads * self.head_dim, d),
                f"{i}.post_attention_norm": (d,),
                f"{i}.ffn_norm": (d,),
                f"{i}.ffn_gate_up": (d, 2 * self.ffn_dim),
                f"{i}.ffn_down": (self.ffn_dim, d),
                f"{i}.post_ffw_norm": (d,),
            }
        shapes["output_norm"] = (d,)
        return shapes


class Gemma:
    """A Gemma 3 decoder with tied embeddings; it keeps views of `tensors` and copies nothing."""

    def __init__(self, config: GemmaConfig, tensors: Mapping[str, F32]) -> None:
        check_tensors(config, tensors)
        self.config = config
        self._tensors = tensors
        pairs = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        self._inv_freq = {True: config.rope_theta**-pairs, False: config.window_rope_theta**-pairs}

    def forward(
        self, ids: Sequence[int] | NDArray[np.integer], positions: NDArray[np.integer], attention: Attention
    ) -> F32:
        """Run t tokens, of any number of sequences, through all layers; the hidden rows [t, hidden_dim].

        ids and positions: [t]. `attention` is called once a layer, in order, and is the only thing that knows
        which rows belong together.
        """
        c, w = self.config, self._tensors
        by_kind = {sees_all: turns(positions, freq) for sees_all, freq in self._inv_freq.items()}
        split = (c.num_heads, c.num_heads + c.num_kv_heads)

        x: F32 = w["token_embd"][np.asarray(ids)] * np.float32(np.sqrt(c.hidden_dim))
        for layer in range(c.num_layers):
            window = c.window(layer)
            turn = by_kind[window is None]
            qkv = self._norm(x, f"{layer}.attn_norm") @ w[f"{layer}.attn_qkv"]
            q, k, v = np.split(qkv.reshape(len(x), -1, c.head_dim), split, axis=1)
            q, k = self._norm(q, f"{layer}.attn_q_norm"), self._norm(k, f"{layer}.attn_k_norm")
            out = attention(layer, window, _rotate(q, turn), _rotate(k, turn), np.ascontiguousarray(v))
            out = out.reshape(len(x), -1) @ w[f"{layer}.attn_output"]
            x = x + self._norm(out, f"{layer}.post_attention_norm")
            gate_up = self._norm(x, f"{layer}.ffn_norm") @ w[f"{layer}.ffn_gate_up"]
            gate, up = np.split(gate_up, 2, axis=1)
            out = (_gelu(gate) * up) @ w[f"{layer}.ffn_down"]
            x = x + self._norm(out, f"{layer}.post_ffw_norm")
        return x

    def logits(self, hidden: F32) -> F32:
        """Logits [r, vocab_size] of hidden rows [r, hidden_dim]: pass only the rows that are sampled from."""
        return np.asarray((self._tensors["token_embd"] @ self._norm(hidden, "output_norm").T).T)

    def _norm(self, x: F32, name: str) -> F32:
        return rms_norm(x, self._tensors[name], self.config.norm_eps)


def _rotate(x: F32, turn: tuple[F32, F32]) -> F32:
    """Rotary position embedding over pairs (0, half), (1, half + 1), ..."""
    cos, sin = turn
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _gelu(x: F32) -> F32:
    # The approximation by tanh is the model's own function.
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))
