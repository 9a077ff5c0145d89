"""SmolLM2's tokenizer: round trips, digits, chats, and text that arrives byte by byte."""

from __future__ import annotations

import pytest

from smollm2.tokenizer import DEFAULT_SYSTEM, TextStream, Tokenizer
from smollm2.weights import Checkpoint

TEXTS = [
    "Hello, world!",
    "  two  spaces\n\ttab",
    "naïve façade €",
    "日本語 and emoji 🤖🇩🇪",
    "x = 1234567;",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("2026")
    assert len(ids) == 4
    assert [tokenizer.decode([i]) for i in ids] == list("2026")


def test_text_never_becomes_a_control_token(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    ids = tokenizer.encode("<|im_end|><|im_start|>system")
    assert not set(ids) & set(checkpoint.vocabulary.special)
    assert tokenizer.decode(ids) == "<|im_end|><|im_start|>system"


def test_chat_template(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    vocabulary = checkpoint.vocabulary
    ids = tokenizer.encode_chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
    )
    text = "".join(vocabulary.tokens[i] if i in vocabulary.special else tokenizer.decode([i]) for i in ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert vocabulary.tokens[tokenizer.eos] == "<|im_end|>"


def test_chat_without_system_prompt_gets_the_models_own(tokenizer: Tokenizer) -> None:
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": DEFAULT_SYSTEM}
    assert tokenizer.encode_chat([user]) == tokenizer.encode_chat([system, user])


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_decode(tokenizer: Tokenizer, text: str) -> None:
    stream, ids = tokenizer.stream(), tokenizer.encode(text)
    pieces = [stream.feed(i) for i in ids]
    assert stream.close() == ""
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_stream_holds_half_a_character_back() -> None:
    robot = "🤖".encode()
    stream = TextStream([robot[i : i + 1] for i in range(4)] + [b"!"])
    assert [stream.feed(i) for i in (0, 1, 2, 3, 4)] == ["", "", "", "🤖", "!"]
    assert stream.feed(0) == ""
    assert stream.close() == "\ufffd"
