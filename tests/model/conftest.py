"""The two models of the generation tests, and what each generates with a contiguous cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2.model import Llama, ModelConfig, random_tensors
from smollm2.tokenizer import Tokenizer
from smollm2.weights import Checkpoint, ModelError, load

from .harness import Scene


@pytest.fixture(scope="session")
def tiny() -> Scene:
    """A random model with grouped queries and a small vocabulary; a run takes a tenth of a second."""
    config = ModelConfig(
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        hidden_dim=48,
        ffn_dim=96,
        vocab_size=101,
        context_length=512,
        rope_theta=1e4,
        norm_eps=1e-5,
    )
    model, rng = Llama(config, random_tensors(config, seed=7)), np.random.default_rng(0)
    common = rng.integers(0, config.vocab_size, 50).tolist()
    prompts = [
        common + rng.integers(0, config.vocab_size, length).tolist()
        for length in (3, 9, 14, 1, 22, 30, 5, 11)
    ]
    return Scene(model, prompts, least_gap=1e-4)


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """SmolLM2, converted if need be."""
    try:
        return load()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer(checkpoint.vocabulary)


@pytest.fixture(scope="session")
def smollm2(checkpoint: Checkpoint) -> Llama:
    return Llama(checkpoint.config, checkpoint.tensors)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Prompts with a common system prompt, and the first tokens that transformers generates from them."""
    path = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "golden.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert len(content["prompts"]) >= 8
    return content


@pytest.fixture(scope="session")
def real(smollm2: Llama, golden: dict[str, Any]) -> Scene:
    """SmolLM2 with the golden prompts; the contiguous runs take about half a minute."""
    return Scene(smollm2, [entry["prompt_ids"] for entry in golden["prompts"]], least_gap=2e-3)
