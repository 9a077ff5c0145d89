"""SmolLM2 as `kvblocks quality` measures it.

Owns: the bridge between the model and the tool, which is also an example of one for another model.
May import: kvblocks, model, tokenizer, weights.
"""

from __future__ import annotations

from kvblocks import CacheConfig
from kvblocks.quality import CacheView, Model
from kvblocks.quality.model import IDS
from kvblocks.report import UserError
from smollm2.model import F32, Llama
from smollm2.tokenizer import Tokenizer
from smollm2.weights import ModelError, load


def smollm2() -> Model:
    """SmolLM2-135M-Instruct with a float32 cache; UserError where it cannot be loaded."""
    try:
        checkpoint = load()
        tokenizer = Tokenizer(checkpoint.vocabulary)
    except ModelError as error:
        raise UserError(str(error)) from error
    return as_model("SmolLM2-135M-Instruct", Llama(checkpoint.config, checkpoint.tensors), tokenizer)


def as_model(name: str, llama: Llama, tokenizer: Tokenizer) -> Model:
    """A Llama as the tool takes it; `tokenizer` needs `encode` only."""

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        def attention(layer: int, q: F32, k: F32, v: F32) -> F32:
            # Write first: a token attends to itself and to the tokens of its chunk before it.
            cache.write(layer, k, v)
            out: F32 = cache.attend(layer, q)
            return out

        hidden = llama.forward(ids, cache.step.positions, attention)
        return llama.logits(hidden[rows])

    c = llama.config
    # A multiple of 32, which formats with groups of tokens ask for.
    config = CacheConfig(c.num_layers, c.num_kv_heads, c.head_dim, block_size=32)
    return Model(name, forward, config, c.context_length, tokenizer.encode, thread_safe=True)
