"""Gemma's tokenizer: text to ids.

Owns: SentencePiece's BPE, whose merges GGUF does not list, and its user-defined pieces.
May import: tokenizers, weights.
Invariant: every text has ids, bytes where the vocabulary lacks a character.
"""

from __future__ import annotations

from gemma3.weights import Vocabulary
from smollm2.weights import INSTALL_READERS, ModelError

_SPACE = "\u2581"
# Of GGUF's types of tokens.
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6


class Tokenizer:
    """BPE over a GGUF vocabulary; building it takes about 5 s."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            from tokenizers import AddedToken, models, normalizers
            from tokenizers import Tokenizer as Pipeline
        except ImportError as error:
            raise ModelError(f"the tokenizer's package is not installed; run: {INSTALL_READERS}") from error
        ids = {token: i for i, token in enumerate(vocabulary.tokens)}
        self._pipeline = Pipeline(
            models.BPE(ids, merges(vocabulary), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
        )
        self._pipeline.normalizer = normalizers.Replace(" ", _SPACE)
        # Runs of line breaks and of spaces among them: these are taken before anything is merged.
        whole = [i for i, kind in enumerate(vocabulary.types) if kind == _USER_DEFINED]
        self._pipeline.add_tokens([AddedToken(vocabulary.tokens[i], normalized=True) for i in whole])
        self.bos = vocabulary.bos

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without a token for the beginning."""
        return list(self._pipeline.encode(text, add_special_tokens=False).ids)


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The pairs that SentencePiece merges, soonest first: every way to put a piece together of two others.

    Of the pairs that stand side by side, it merges the one that makes the piece of the highest score.
    """
    known = {
        token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _NORMAL
    }
    order = sorted(range(len(vocabulary.tokens)), key=lambda i: -vocabulary.scores[i])
    found = []
    for piece in (vocabulary.tokens[i] for i in order if vocabulary.types[i] == _NORMAL):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                found.append((left, right))
    return found
