"""docs/hashing.md is exact: its example and its vectors are recomputed, from the page's rules and hashlib alone."""

import ast
import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvblocks as kv

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hashing.md").read_text()
Key = str | bytes | int | bool


def vectors() -> list[tuple[str, list[str]]]:
    """The calls of the page and the digests below each."""
    (listing,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    pairs = re.findall(r"^(block_hashes\(.*\))\n((?:# [0-9a-f]+\n)+)", listing, re.MULTILINE)
    assert "".join(call + "\n" + digests for call, digests in pairs) == re.sub(r"\n\n", "\n", listing)
    return [(call, digests.replace("# ", "").split()) for call, digests in pairs]


def arguments(call: str) -> dict[str, Any]:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    values: dict[str, Any] = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    tokens = node.args[0]
    assert isinstance(tokens, ast.Call)
    values["tokens"] = list(range(*(ast.literal_eval(bound) for bound in tokens.args)))
    values["block_size"] = ast.literal_eval(node.args[1])
    return values


def frame(kind: int, value: Key) -> bytes:
    if isinstance(value, bool):
        tag, encoded = 4, bytes([value])
    elif isinstance(value, int):
        tag, encoded = 3, struct.pack("<q", value)
    elif isinstance(value, bytes):
        tag, encoded = 2, value
    else:
        tag, encoded = 1, value.encode()
    return bytes([kind, tag]) + struct.pack("<I", len(encoded)) + encoded


def sha256_by_hand(
    tokens: list[int],
    block_size: int,
    seed: int,
    adapter: Key | None = None,
    salt: Key | None = None,
    media: list[tuple[Key, int, int]] | None = None,
) -> list[str]:
    keys = b"".join(frame(kind, value) for kind, value in ((1, adapter), (2, salt)) if value is not None)
    digest = hashlib.sha256(struct.pack("<Q", seed) + keys).digest()
    digests = []
    for first in range(0, len(tokens) - block_size + 1, block_size):
        block = digest + struct.pack(f"<{block_size}I", *tokens[first : first + block_size])
        for item, start, length in sorted(media or [], key=lambda entry: entry[1:]):
            if start < first + block_size and first < start + length:
                block += frame(3, item) + struct.pack("<qQ", first - start, length)
        digest = hashlib.sha256(block).digest()
        digests.append(digest.hex())
    return digests


def hexadecimal(digests: np.ndarray) -> list[str]:
    return [digest.tobytes().hex() for digest in digests]


def test_the_page_covers_both_algorithms_and_every_kind_and_type_of_key() -> None:
    calls = [arguments(call) for call, _ in vectors()]
    for algorithm in ("xxh3", "sha256"):
        of_it = [call for call in calls if call["algorithm"] == algorithm]
        assert len(of_it) >= 8
        values = [call.get(name) for call in of_it for name in ("adapter", "salt")]
        values += [item[0] for call in of_it for item in call.get("media", [])]
        assert {type(value) for value in values} >= {str, bytes, int, bool, type(None)}
        assert len({call["seed"] for call in of_it}) >= 2


@pytest.mark.parametrize(("call", "digests"), vectors())
def test_a_vector_of_the_page(call: str, digests: list[str]) -> None:
    given = arguments(call)
    assert hexadecimal(kv.block_hashes(**given)) == digests
    if given.pop("algorithm") == "sha256":
        assert sha256_by_hand(**given) == digests
    else:
        assert {len(digest) for digest in digests} == {32}


@pytest.mark.parametrize(("call", "digests"), vectors())
def test_a_manager_gives_the_same_digests(call: str, digests: list[str]) -> None:
    given = arguments(call)
    options = {name: given.pop(name) for name in ("seed", "algorithm")}
    manager = kv.BlockManager(4, given.pop("block_size"), **options)
    assert hexadecimal(manager.prepare(given.pop("tokens"), **given).block_hashes) == digests


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
def test_a_chain_can_be_continued_from_its_parent(algorithm: str) -> None:
    options: dict[str, Any] = {"seed": 3, "algorithm": algorithm}
    whole = kv.block_hashes(range(13), 4, adapter="sql", media=[(b"\x01", 6, 5)], **options)
    parent = whole[0].tobytes()
    rest = kv.block_hashes(range(4, 13), 4, parent=parent, media=[(b"\x01", 2, 5)], **options)
    assert rest.tolist() == whole[1:].tolist()
    assert len(whole) == 3


def test_the_worked_example() -> None:
    (listing,) = re.findall(r"^```text\n(root.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    printed = re.findall(r"^ {9}([0-9a-f]{64})$", listing, re.MULTILINE)
    # Bytes stand in one column, words after them in the next.
    rows = re.findall(r"^.{20}((?:[0-9a-f]+ )*[0-9a-f]+)  ", listing, re.MULTILINE)
    hexes = [row.replace(" ", "") for row in rows]
    assert len(hexes) == 3 + 4
    root = hashlib.sha256(bytes.fromhex("".join(hexes[:3]))).hexdigest()
    block = hashlib.sha256(bytes.fromhex(root + "".join(hexes[3:]))).hexdigest()
    assert printed == [root, block]
    given: dict[str, Any] = {"seed": 7, "adapter": "sql", "salt": -7, "media": [(b"\xab\xcd", 2, 4)]}
    digests = kv.block_hashes(range(8), 4, algorithm="sha256", **given)
    assert digests[0].tobytes().hex() == block
    assert sha256_by_hand(list(range(8)), 4, **given) == hexadecimal(digests)


def test_the_order_of_media_items_is_not_the_callers() -> None:
    items: list[tuple[Key, int, int]] = [("b", 1, 2), ("a", 1, 2), (b"c", 0, 3), (4, 0, 2)]
    options: dict[str, Any] = {"seed": 0, "algorithm": "sha256"}
    digests = [kv.block_hashes(range(4), 4, media=order, **options) for order in (items, items[::-1])]
    assert digests[0].tolist() == digests[1].tolist()
    # In the order of (start, digest, length); of digests, text before bytes before integers.
    parts = [frame(3, b"c"), frame(3, 4), frame(3, "a"), frame(3, "b")]
    spans = [(0, 3), (0, 2), (-1, 2), (-1, 2)]
    block = hashlib.sha256(struct.pack("<Q", 0)).digest() + struct.pack("<4I", 0, 1, 2, 3)
    block += b"".join(part + struct.pack("<qQ", *span) for part, span in zip(parts, spans, strict=True))
    assert hexadecimal(digests[0]) == [hashlib.sha256(block).hexdigest()]
