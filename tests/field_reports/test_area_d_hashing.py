"""Area D: hash collisions, isolation, security. P040 and P042 need a hasher that always collides: see collisions.rs."""

import hashlib
import itertools
import os
import struct
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest

import kvblocks as kv

from .helpers import Engine

Algorithm = Literal["xxh3", "sha256"]
ALGORITHMS: tuple[Algorithm, ...] = ("xxh3", "sha256")


def hashes(tokens: Any, block_size: int, algorithm: Algorithm = "xxh3", **keys: Any) -> list[str]:
    """Digests of the full blocks, as hex; under seed 0 if none is given."""
    digests = kv.block_hashes(tokens, block_size, algorithm=algorithm, **({"seed": 0} | keys))
    return [bytes(digest).hex() for digest in digests]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_p039_the_seed_is_explicit_random_by_default_and_the_hash_is_wide(algorithm: Algorithm) -> None:
    def of(manager: kv.BlockManager) -> bytes:
        return manager.prepare(range(1, 17)).block_hashes.tobytes()

    managers = [kv.BlockManager(4, 16, algorithm=algorithm) for _ in range(8)]
    assert len({manager.seed for manager in managers}) == len({of(manager) for manager in managers}) == 8
    assert all(len(of(manager)) >= 16 for manager in managers)
    one, same, other = (kv.BlockManager(4, 16, algorithm=algorithm, seed=seed) for seed in (1, 1, 2))
    assert of(one) == of(same) != of(other)
    assert of(one) == kv.block_hashes(range(1, 17), 16, seed=1, algorithm=algorithm).tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_p039_the_seed_of_a_manager_serves_whoever_computes_its_hashes(algorithm: Algorithm) -> None:
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    managers = [kv.BlockManager(4, 16, algorithm=algorithm, seed=seed) for seed in seeds]
    assert [manager.seed for manager in managers] == seeds
    managers += [kv.BlockManager(4, 16, algorithm=algorithm) for _ in range(16)]  # half above 2**63
    for manager in managers:
        expected = manager.prepare(range(32)).block_hashes.tolist()
        assert kv.block_hashes(range(32), 16, seed=manager.seed, algorithm=algorithm).tolist() == expected
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            kv.BlockManager(4, 16, seed=seed)
        with pytest.raises(ValueError, match="seed"):
            kv.block_hashes(range(16), 16, seed=seed)


def test_p040_what_has_lost_its_parent_is_not_counted_as_a_collision() -> None:
    engine = Engine(5, 4)
    handle = engine.serve(range(8))
    engine.manager.drop_range(handle, 0, 4)
    engine.manager.free(engine.admit(range(100, 116)))  # evicts the first block; the second is in use
    engine.cache(range(4))  # the first once more: the second does not follow it
    engine.ask(range(9))
    assert engine.manager.stats().collided_blocks == 0
    engine.pool()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_p041_no_algebra_finds_a_collision(algorithm: Algorithm) -> None:
    block = [100_000 + 7 * i for i in range(16)]
    (expected,) = hashes(block, 16, algorithm)
    seen = {expected}
    variants = 0
    for base, at, sign in itertools.product((31, 33, 131, 1_000_003), range(15), (1, -1)):
        for first, second in ((base, -1), (-1, base)):
            changed = list(block)
            changed[at] += sign * first
            changed[at + 1] += sign * second
            if min(changed) >= 0:
                seen.update(hashes(changed, 16, algorithm))
                variants += 1
    assert variants >= 150
    assert len(seen) == variants + 1
    orders = {hashes(order, 4, algorithm)[0] for order in itertools.permutations([1, 2, 3, 4])}
    assert len(orders) == 24


def test_p043_a_salt_partitions_the_cache() -> None:
    engine = Engine(16, 16)
    assert engine.ask(range(64), salt="s1").num_cached_tokens == 0
    engine.cache(range(64), salt="s1")
    assert engine.ask(range(64), salt="s2").num_cached_tokens == 0
    assert engine.ask(range(64), salt="s1").num_cached_tokens == 48
    assert engine.hits(range(64)) == 0
    usage = engine.manager.namespace_usage(salt="s1")
    assert (usage.queried_tokens, usage.hit_tokens, usage.num_seqs) == (192, 48, 2)
    assert engine.manager.namespace_usage(salt="s2").hit_tokens == 0


def test_p044_isolation_and_sharing_in_one_test() -> None:
    engine = Engine(16, 4)
    engine.cache(range(8), salt="tenant")
    assert (engine.hits(range(9), salt="tenant"), engine.hits(range(9), salt="other")) == (8, 0)
    # Two fields that say who is asking are never run together.
    pairs = [("org_1", "2345"), ("org_12345", "x"), ("org_12345", None), (None, "org_12345")]
    assert len({hashes(range(4), 4, adapter=adapter, salt=salt)[0] for adapter, salt in pairs}) == 4
    for empty in ("", b""):
        with pytest.raises(ValueError, match="not empty"):
            engine.manager.prepare(range(8), salt=empty)
        with pytest.raises(ValueError, match="not empty"):
            engine.manager.prepare(range(8), adapter=empty)


# Of tokens 0..31, block size 16, seed 0. Computed once with the packages xxhash and hashlib from the encoding that
# hash.rs documents; XXH3's value is written little-endian.
GOLDEN: dict[Algorithm, list[str]] = {
    "xxh3": ["22165328e4897fa46a90f19e491cfc55", "53ae14e3e5e3ab25bbd3d6fa9b7a3790"],
    "sha256": [
        "b23a6b55bbad66a932015c5158e1d8d713d1e7828e768323af6043416d0518de",
        "efda77d94932e4404d25a1ed66a2ba353f946be6a7b67a0df248c4cc0aeba6af",
    ],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_p046_hashes_are_the_same_in_every_process(algorithm: Algorithm) -> None:
    assert hashes(range(32), 16, algorithm) == GOLDEN[algorithm]
    manager = kv.BlockManager(4, 16, seed=0, algorithm=algorithm)
    assert manager.prepare(range(32)).block_hashes.tobytes().hex() == "".join(GOLDEN[algorithm])
    code = (
        "import sys, kvblocks\n"
        "digests = kvblocks.block_hashes(range(32), 16, seed=0, algorithm=sys.argv[1])\n"
        "sys.stdout.write(digests.tobytes().hex())"
    )
    for hash_seed in ("random", "1"):
        child = subprocess.run(
            [sys.executable, "-c", code, algorithm],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert child.stdout == "".join(GOLDEN[algorithm])


KEYED: list[tuple[dict[str, Any], str]] = [
    ({"adapter": "lora", "salt": b"tenant"}, "4435aa24af773dc431b7bf0daf458e1f"),
    ({"media": [(b"\x01\x02", 10, 10)]}, "f517cb16493de41e17a2b823b74d0738"),
    ({"salt": -5}, "4ff0c53aabb2527bd800dd32d0a298de"),
    ({"adapter": True}, "36dff3a7502a43f4851e14307fd62ed9"),
    ({"seed": 2**63 + 1}, "2835d2d29e18240dd661d21f6ecb61a5"),
]


@pytest.mark.parametrize(("keys", "digest"), KEYED)
def test_p046_keys_and_seeds_are_in_the_golden_vectors_too(keys: dict[str, Any], digest: str) -> None:
    assert hashes(range(32), 16, **keys)[1] == digest


def frame(kind: int, tag: int, value: bytes) -> bytes:
    """A key as it is encoded."""
    return bytes([kind, tag]) + len(value).to_bytes(4, "little") + value


@pytest.mark.parametrize(
    ("keys", "seed", "namespace", "extras"),
    [
        ({}, 0, b"", {}),
        ({}, 2**64 - 1, b"", {}),
        ({"adapter": "lora", "salt": b"tenant"}, 7, frame(1, 1, b"lora") + frame(2, 2, b"tenant"), {}),
        ({"salt": -5, "adapter": True}, 7, frame(1, 4, b"\1") + frame(2, 3, b"\xfb" + b"\xff" * 7), {}),
        (
            {"media": [("é", 3, 4)]},
            7,
            b"",
            {block: frame(3, 1, "é".encode()) + struct.pack("<qQ", 4 * block - 3, 4) for block in (0, 1)},
        ),
    ],
)
def test_p046_sha256_can_be_computed_from_the_documented_encoding(
    keys: dict[str, Any], seed: int, namespace: bytes, extras: dict[int, bytes]
) -> None:
    tokens = [2**32 - 1, *range(11)]
    digest = hashlib.sha256(seed.to_bytes(8, "little") + namespace).digest()
    expected = []
    for block in range(3):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[4 * block : 4 * block + 4])
        digest = hashlib.sha256(digest + ids + extras.get(block, b"")).digest()
        expected.append(digest.hex())
    assert hashes(tokens, 4, "sha256", seed=seed, **keys) == expected
    parent = bytes.fromhex(expected[1])
    if not keys.get("media"):
        assert hashes(tokens[8:], 4, "sha256", seed=seed, parent=parent) == expected[2:]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_p047_ids_are_encoded_at_a_fixed_width(algorithm: Algorithm) -> None:
    assert hashes([1, 23], 2, algorithm) != hashes([12, 3], 2, algorithm)
    assert hashes([65536], 1, algorithm) != hashes([0], 1, algorithm)
    assert len(hashes([2**31, 2**32 - 1], 1, algorithm)) == 2
    for wrong in ([-1], [2**32], np.array([-1]), np.array([2**32]), np.array([5, -5], np.int32)):
        with pytest.raises(ValueError, match=r"tokens\[[01]\] is .*, expected an id in 0\.\.2\*\*32"):
            hashes(wrong, 1, algorithm)
        with pytest.raises(ValueError, match="expected an id"):
            kv.BlockManager(4, 2).prepare(wrong)
    expected = hashes(list(range(64)), 16, algorithm)
    for dtype in (np.int32, np.int64, np.uint32):
        assert hashes(np.arange(64, dtype=dtype), 16, algorithm) == expected
        assert hashes(np.arange(128, dtype=dtype)[::2] // 2, 16, algorithm) == expected
        assert hashes(np.repeat(np.arange(64, dtype=dtype), 2)[::2], 16, algorithm) == expected


@pytest.mark.parametrize("publish", ["commit", "schedule"])
def test_p048_a_draft_is_not_found_before_it_is_accepted(publish: str) -> None:
    engine = Engine(16, 4, publish=publish)
    handle = engine.serve(range(4))
    assert engine.step.schedule(handle, 5)  # drafts: 4, 5, 6, 7, 8
    assert engine.hits(range(9)) == 4
    engine.manager.commit(handle, 4, [4, 5, 60, 70])  # the model's own third and fourth
    assert engine.hits(range(9)) == 4
    assert engine.hits([0, 1, 2, 3, 4, 5, 60, 70, 0]) == 8
    engine.pool()
