"""Check the golden tokens, and this folder's forward pass, against Hugging Face transformers on the same weights.

Owns: the bridge from our tensors to a LlamaForCausalLM, and the file golden.json. May import: everything beside
it, torch, transformers. Invariant: golden.json holds what transformers generated, never what our own code did.
Nothing is fetched: the model is built from the dequantised GGUF. Needs the extra `hf`; takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from smollm2.contiguous import ContiguousCache
from smollm2.model import Llama
from smollm2.tokenizer import Tokenizer
from smollm2.weights import Checkpoint, ModelError, load

GOLDEN = Path(__file__).with_name("golden.json")
NUM_TOKENS = 16
TOLERANCE = 5e-3  # of a logit; the golden tokens' logits lead by more


def main() -> int:
    """Compare, or rewrite golden.json with --update; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--golden", type=Path, default=GOLDEN, metavar="FILE")
    parser.add_argument("--update", action="store_true", help="write what transformers generates to the file")
    arguments = parser.parse_args()
    try:
        checkpoint = load()
        theirs = build_reference(checkpoint)
    except (ModelError, ModuleNotFoundError) as error:
        print(f'{parser.prog}: {error}; needs: pip install "kvblocks[hf]"', file=sys.stderr)
        return 2
    tokenizer, ours = Tokenizer(checkpoint.vocabulary), Llama(checkpoint.config, checkpoint.tensors)
    golden = json.loads(arguments.golden.read_text("utf-8"))
    failures = 0
    for entry in golden["prompts"]:
        system, user = golden["system"], entry["prompt"]
        chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        ids = tokenizer.encode_chat(chat)
        tokens, logits = generate(theirs, ids, NUM_TOKENS)
        difference = float(np.abs(logits - ContiguousCache(ours, len(ids)).extend(ids)).max())
        if arguments.update:
            entry["prompt_ids"], entry["tokens"] = ids, tokens
        same = ids == entry["prompt_ids"] and tokens == entry["tokens"] and difference < TOLERANCE
        failures += not same
        print(f"{'same' if same else 'DIFFERENT'}  logits within {difference:.1e}  {user}", flush=True)
        if not same:
            print(f"    expected {entry['tokens']}\n    got      {tokens}")
    if arguments.update:
        arguments.golden.write_text(_one_line_each(golden), "utf-8")
    return 1 if failures else 0


def build_reference(checkpoint: Checkpoint) -> Any:
    """A float32 LlamaForCausalLM with our weights, its Q and K turned back to half-split rotary pairs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c, tensors = checkpoint.config, checkpoint.tensors
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_dim,
        intermediate_size=c.ffn_dim,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )

    def half_split(matrix: Any) -> Any:
        # GGUF rotates rows (0, 1), (2, 3), ... of a head together, transformers (0, d/2), (1, d/2 + 1), ...
        pairs = matrix.T.reshape(-1, c.head_dim // 2, 2, c.hidden_dim)
        return pairs.swapaxes(1, 2).reshape(-1, c.hidden_dim)

    state = {
        "model.embed_tokens.weight": tensors["token_embd"],
        "lm_head.weight": tensors["token_embd"],
        "model.norm.weight": tensors["output_norm"],
    }
    q_cols, kv_cols = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i in range(c.num_layers):
        q, k, v = np.split(tensors[f"{i}.attn_qkv"], [q_cols, q_cols + kv_cols], axis=1)
        gate, up = np.split(tensors[f"{i}.ffn_gate_up"], 2, axis=1)
        state |= {
            f"model.layers.{i}.input_layernorm.weight": tensors[f"{i}.attn_norm"],
            f"model.layers.{i}.self_attn.q_proj.weight": half_split(q),
            f"model.layers.{i}.self_attn.k_proj.weight": half_split(k),
            f"model.layers.{i}.self_attn.v_proj.weight": v.T,
            f"model.layers.{i}.self_attn.o_proj.weight": tensors[f"{i}.attn_output"].T,
            f"model.layers.{i}.post_attention_layernorm.weight": tensors[f"{i}.ffn_norm"],
            f"model.layers.{i}.mlp.gate_proj.weight": gate.T,
            f"model.layers.{i}.mlp.up_proj.weight": up.T,
            f"model.layers.{i}.mlp.down_proj.weight": tensors[f"{i}.ffn_down"].T,
        }
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    return model


def generate(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Any]:
    """Greedy tokens, and the logits [vocab_size] after the prompt."""
    import torch

    tokens: list[int] = []
    first = None
    with torch.inference_mode():
        for _ in range(num_tokens):
            # The whole sequence every time: no cache of theirs takes part in the comparison.
            ids = torch.tensor([[*prompt, *tokens]])
            logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
            first = logits.numpy() if first is None else first
            tokens.append(int(logits.argmax()))
    return tokens, first


def _one_line_each(golden: dict[str, Any]) -> str:
    """The file with one prompt a line, so that a change shows as one line."""
    lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in golden["prompts"])
    return f'{{\n "system": {json.dumps(golden["system"])},\n "prompts": [\n  {lines}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
