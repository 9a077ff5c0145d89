"""SmolLM2's tokenizer: text to ids, chats to ids, and ids back to text as they arrive.

Owns: byte-level BPE with digits split one by one, the chat template, incremental detokenisation.
May import: tokenizers, weights.
Invariant: text never becomes a control token, so a user cannot close his own turn; and a `TextStream` prints
whole characters only, whose concatenation is the text of all its ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence

from smollm2.weights import INSTALL_READERS, ModelError, Vocabulary

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Byte-level BPE over a GGUF vocabulary; building it takes about 0.1 s."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            from tokenizers import Tokenizer as Pipeline
            from tokenizers import models, pre_tokenizers
        except ImportError as error:
            raise ModelError(f"the tokenizer's package is not installed; run: {INSTALL_READERS}") from error
        ids = {token: i for i, token in enumerate(vocabulary.tokens)}
        merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
        self._pipeline = Pipeline(models.BPE(ids, merges))
        self._pipeline.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._bytes = _token_bytes(vocabulary)
        self.eos = vocabulary.eos
        self._start, self._end = ids["<|im_start|>"], ids["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; what looks like a control token is text too."""
        return list(self._pipeline.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat (mappings with `role` and `content`) up to where the assistant starts to answer."""
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
        newline, ids = self.encode("\n"), []
        for message in messages:
            turn = self.encode(f"{message['role']}\n{message['content']}")
            ids += [self._start, *turn, self._end, *newline]
        return [*ids, self._start, *self.encode("assistant\n")]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control tokens have none, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self) -> TextStream:
        """A decoder for the ids of one answer, fed as they are generated."""
        return TextStream(self._bytes)


class TextStream:
    """Incremental detokenisation: a character's text appears with the id that completes it."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that this id completes, perhaps none."""
        return self._decoder.decode(self._bytes[token])

    def close(self) -> str:
        """What is left at the end: U+FFFD for a character that never came whole."""
        return self._decoder.decode(b"", final=True)


def _token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    # Byte-level BPE writes each byte as a printable character: itself where it prints, else 256, 257, ...
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(others)}
    special = set(vocabulary.special)
    return [
        b"" if i in special else bytes(alphabet[character] for character in token)
        for i, token in enumerate(vocabulary.tokens)
    ]
