"""Models for the tests: a random one with a real cache, and one that is known by heart."""

from dataclasses import replace

import numpy as np

from kvblocks import CacheConfig
from kvblocks.quality import CacheView, Forward, Model
from kvblocks.quality.model import F32, IDS
from smollm2.model import Llama, ModelConfig, random_tensors
from smollm2.quality import as_model

CONFIG = ModelConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_dim=32,
    ffn_dim=48,
    vocab_size=97,
    context_length=1024,
    rope_theta=1e4,
    norm_eps=1e-5,
)


class Characters:
    """A tokenizer of the simplest kind: a character is a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % CONFIG.vocab_size for character in text]


def llama() -> Llama:
    return Llama(CONFIG, random_tensors(CONFIG, seed=3))


def model() -> Model:
    """A random model; what it predicts depends on its whole context."""
    made = as_model("tiny", llama(), Characters())  # type: ignore[arg-type]
    # So that a test sees its calls in one order; the others say what they want.
    return replace(made, thread_safe=False)


def counting(probability: float, vocab_size: int = 10) -> Model:
    """Says with `probability` that the next token is one more than this one, all others alike."""
    rest = (1 - probability) / (vocab_size - 1)

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        logits = np.full((len(rows), vocab_size), np.log(rest), np.float32)
        logits[np.arange(len(rows)), (ids[rows] + 1) % vocab_size] = np.log(probability)
        return logits

    return fake(forward)


def fake(forward: Forward) -> Model:
    """A model whose K and V have no influence."""

    def step(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        nothing = np.zeros((len(ids), 1, 8), np.float32)
        cache.write(0, nothing, nothing)
        cache.attend(0, nothing)
        return forward(cache, ids, rows)

    return Model("fake", step, CacheConfig(1, 1, 8), 4096, lambda text: [ord(c) % 128 for c in text])


def past_its_cache() -> Model:
    """A model that never looks at its cache."""
    return replace(model(), forward=lambda cache, ids, rows: np.zeros((len(rows), 128), np.float32))


def not_a_model() -> str:
    return "text"
