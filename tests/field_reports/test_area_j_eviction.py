"""Area J: the order of eviction."""

import pytest

from .helpers import Engine


def test_p082_the_deepest_block_goes_first() -> None:
    engine = Engine(3, 4)
    chain = engine.cache(range(12))
    taken = engine.admit([99])
    assert engine.table(taken) == [chain[2]]
    assert engine.hits(range(13)) == 8


def test_p082_a_hit_on_a_suffix_refreshes_its_whole_prefix() -> None:
    engine = Engine(6, 4)
    engine.cache(range(12))
    engine.cache(range(100, 112))
    engine.manager.free(engine.admit([*range(8), 9]))  # hits 2 blocks of the first chain; evicts its third
    assert engine.hits(range(13)) == 8
    order = []
    for n in range(5):
        engine.admit([200 + n])
        order.append((engine.hits(range(13)), engine.hits(range(100, 113))))
    # One block is free; then the second chain, which was used before that hit, and then the first.
    assert order == [(8, 12), (8, 8), (8, 4), (8, 0), (4, 0)]


def test_p082_chains_released_together_keep_their_prefixes_longest() -> None:
    engine = Engine(6, 4)
    handles = [engine.serve(range(100 * n, 100 * n + 12)) for n in range(2)]
    engine.manager.free(handles)
    left = []
    for n in range(6):
        engine.admit([900 + n])
        left.append(tuple(engine.hits([*range(100 * i, 100 * i + 12), 0]) for i in range(2)))
    assert left == [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]


@pytest.mark.parametrize("reuse", ["last_freed", "first_freed"])
def test_p083_a_hit_and_an_insertion_refresh(reuse: str) -> None:
    engine = Engine(3, 4, reuse=reuse)
    prompts = {name: [ord(name)] * 4 for name in "PQRST"}

    def cached() -> str:
        return "".join(name for name, prompt in prompts.items() if engine.hits([*prompt, 0]))

    for name in "PQR":
        engine.cache(prompts[name])
    engine.manager.free(hit(engine, prompts["P"]))
    engine.cache(prompts["S"])
    assert cached() == "PRS"
    engine.cache(prompts["T"])
    assert cached() == "PST"


def hit(engine: Engine, prompt: list[int]) -> int:
    """A request that uses the cached block of a prompt and takes no other."""
    answer = engine.ask([*prompt, 0], reserve=len(prompt))
    assert answer.num_cached_tokens == len(prompt)
    return int(answer.handle)


def test_p084_a_recycled_block_ends_a_walk_along_its_old_chain() -> None:
    engine = Engine(4, 4)
    handle = engine.serve(range(12))
    chain = engine.table(handle)
    engine.manager.drop_range(handle, 4, 8, unpublish=True)
    other = engine.serve(range(50, 58))  # fills the one free block and the middle one
    assert chain[1] in engine.table(other)
    assert engine.hits(range(13)) == 4
    assert engine.hits([*range(4), *range(50, 58), 0]) == 4
    engine.manager.free([handle, other])
    assert engine.hits(range(13)) == 4
    assert engine.hits(range(50, 59)) == 8
    # Computed again, the middle makes the chain whole once more.
    engine.cache(range(12))
    assert engine.hits(range(13)) == 12
    engine.pool()


def test_p084_an_evicted_parent_is_not_replaced_by_another_block_of_its_id() -> None:
    engine = Engine(5, 4)
    handle = engine.serve(range(12))
    engine.manager.drop_range(handle, 0, 8)  # cached, the first two; the third is in use
    engine.admit(range(50, 66))
    assert engine.manager.stats().evicted_blocks == 2
    engine.manager.free(handle)
    assert engine.hits(range(13)) == 0
    assert engine.hits([*range(50, 58), *range(8, 12), 0]) == 0
    engine.pool()
