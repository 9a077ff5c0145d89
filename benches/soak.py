"""Random work for a block manager, as long as one likes.

Run it from the checkout: python benches/soak.py 10000000

All verbs, in batches and one by one, with prompts that share prefixes, steps in flight, rejected drafts, forks,
windows, preemptions and transfers, over managers of several options in turn. Integrity is checked again and again.
Exit status 1 at a violation, or if the resident set has grown between the first tenth and the end by more than the
limit.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from kvblocks import Allocated, BlockManager, Prompt, Step

MAX_SEQS = 48
MAX_LENGTH = 1500
MAX_TRANSFERS = 12

OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"publish": "schedule", "full_hit": "token"},
    {"merge": True, "algorithm": "sha256", "watermark_blocks": 7},
    {"reuse": "first_freed", "null_block": False},
    {"enable_prefix_cache": False},
    {"series_every": 3, "series_len": 64},
)


class Driver:
    """One manager, what is known about its sequences, and the verbs in random order."""

    def __init__(self, seed: int, block_size: int, options: dict[str, object]) -> None:
        self.rng = np.random.default_rng(seed)
        self.manager = BlockManager(513, block_size, seed=seed, **options)  # type: ignore[arg-type]
        # Windows let a table grow longer than the pool.
        columns = 2 * MAX_LENGTH
        self.step = Step(
            self.manager, max_seqs=MAX_SEQS, max_tokens=4096, max_blocks_per_seq=columns, depth=2
        )
        self.steps: dict[int, list[int]] = {}  # handle -> tokens of its steps in flight, oldest first
        self.preempted: dict[int, Prompt] = {}
        self.transfers: list[int] = []
        self.publishes_early = options.get("publish") == "schedule"
        self.operations = 0
        self.verbs = {
            self.admit: 14,
            self.schedule: 30,
            self.commit: 30,
            self.abort: 2,
            self.truncate: 3,
            self.fork: 3,
            self.reorder: 1,
            self.drop_range: 2,
            self.move_slots: 1,
            self.declare: 1,
            self.preempt: 2,
            self.resume: 3,
            self.free: 4,
            self.begin_transfer: 2,
            self.end_transfer: 2,
            self.look: 2,
            self.forget: 1,
        }

    def run(self, operations: int) -> None:
        """So many calls of verbs."""
        verbs = list(self.verbs)
        weights = np.array(list(self.verbs.values()), np.float64)
        end = self.operations + operations
        while self.operations < end:
            for index in self.rng.choice(len(verbs), 64, p=weights / weights.sum()).tolist():
                verbs[index]()

    def finish(self) -> list[str]:
        """End everything; what is wrong then, lost blocks included."""
        for transfer in self.transfers:
            self.manager.complete_transfer(transfer)
        self.manager.free([*self.steps, *self.preempted])
        self.transfers, self.steps, self.preempted = [], {}, {}
        stats = self.manager.stats()
        violations = self.manager.check_integrity()
        if stats.free_blocks + stats.cached_blocks != stats.capacity_blocks:
            violations.append(f"{stats.live_blocks} live and {stats.held_blocks} held blocks have no owner")
        return violations

    def pick(self, most: int, where: list[int] | None = None) -> list[int]:
        """Some running sequences."""
        handles = list(self.steps) if where is None else where
        count = min(int(self.rng.integers(1, most + 1)), len(handles))
        return [handles[i] for i in self.rng.permutation(len(handles))[:count]]

    def admit(self) -> None:
        """A prompt that shares one of few prefixes, some in namespaces or with media."""
        rng = self.rng
        if len(self.steps) + len(self.preempted) >= MAX_SEQS:
            self.free()
            return
        family, shared, own = rng.integers(0, [8, 400, 120]).tolist()
        start = int(rng.integers(0, 40)) * 1000
        tokens = np.concatenate([np.arange(shared), 50_000 + start + np.arange(own)]) + 100_000 * family
        media = [("image", 0, 3)] if shared > 3 and family == 1 else None
        salt: str | int | None = "tenant" if family == 2 else 7 if family == 3 else None
        kind = np.int32 if family % 2 else np.int64
        prompt = self.manager.prepare(tokens.astype(kind), salt=salt, media=media)
        reserve = int(rng.integers(0, len(tokens) + 40)) if rng.random() < 0.3 else None
        resident = int(rng.integers(1, 20)) if rng.random() < 0.2 else None
        possible = self.manager.can_allocate(prompt, reserve, max_resident_blocks=resident)
        answer = self.manager.allocate(prompt, reserve, max_resident_blocks=resident)
        assert bool(answer) == bool(possible), f"can_allocate says {possible}, allocate {answer}"
        self.operations += 3
        if isinstance(answer, Allocated):
            self.steps[answer.handle] = []
        elif self.steps and rng.random() < 0.5:
            self.free()

    def schedule(self) -> None:
        """A batch: what is left of prompts, or a few tokens, with and without look-ahead."""
        rng = self.rng
        handles, counts = [], []
        budget = 2000
        for handle in self.pick(MAX_SEQS):
            cursors = self.manager.sequence(handle)
            if len(self.steps[handle]) == 2 or cursors.num_scheduled >= MAX_LENGTH:
                continue
            left = cursors.num_tokens - cursors.num_scheduled
            count = min(left, int(rng.integers(1, 300))) if left > 0 else int(rng.integers(0, 4))
            if count <= budget:
                handles.append(handle)
                counts.append(count)
                budget -= count
        policy = "fit" if rng.random() < 0.8 else "all"
        scheduled = self.step.schedule(
            np.array(handles, np.int64),
            np.array(counts, np.int32),
            lookahead=int(rng.integers(0, 3)),
            policy=policy,  # type: ignore[arg-type]
            pad_seqs=MAX_SEQS if rng.random() < 0.2 else 0,
        )
        self.operations += 1
        for handle, count in zip(handles[: scheduled.num_seqs], counts, strict=False):
            self.steps[handle].append(count)
        if not scheduled and scheduled.num_seqs == 0:
            self.free()

    def commit(self) -> None:
        """The oldest steps of a batch, some of their tokens rejected."""
        rng = self.rng
        handles, counts, unknown = [], [], 0
        for handle in self.pick(MAX_SEQS):
            steps = self.steps[handle]
            if not steps:
                continue
            cursors = self.manager.sequence(handle)
            count = steps[0]
            # Blocks published before they were computed may have been hit, and cannot be taken back then.
            if len(steps) == 1 and rng.random() < 0.2 and not self.publishes_early:
                count = int(rng.integers(0, count + 1))
            unknown += max(0, cursors.num_computed + count - cursors.num_tokens)
            handles.append(handle)
            counts.append(count)
            steps.pop(0)
        tokens = rng.integers(0, 3, unknown, dtype=np.int32)
        self.manager.commit(np.array(handles, np.int64), np.array(counts, np.int32), tokens)
        self.operations += 1

    def idle(self) -> list[int]:
        """Sequences without a step in flight."""
        return [handle for handle, steps in self.steps.items() if not steps]

    def abort(self) -> None:
        """The newest step of a sequence did not run."""
        if self.publishes_early:
            return
        for handle in self.pick(1, [handle for handle, steps in self.steps.items() if steps]):
            self.manager.abort_step(handle)
            self.steps[handle].pop()
            self.operations += 1

    def truncate(self) -> None:
        """Cut some sequences, not inside a dropped block."""
        handles, lengths = [], []
        for handle in self.pick(4, self.idle()):
            length = int(self.rng.integers(0, self.manager.sequence(handle).num_computed + 1))
            column, offset = divmod(length, self.manager.block_size)
            table = self.manager.block_table(handle)
            if offset == 0 or table[column] != self.manager.null_block_id:
                handles.append(handle)
                lengths.append(length)
        self.manager.truncate(handles, lengths, spare="keep" if self.rng.random() < 0.3 else "free")
        self.operations += 1

    def fork(self) -> None:
        """Children of two parents."""
        if len(self.steps) + len(self.preempted) > MAX_SEQS - 6:
            return
        handles = self.pick(2)
        children = self.manager.fork(handles, self.rng.integers(0, 4, len(handles), dtype=np.int32))
        self.operations += 1
        self.steps.update((child, []) for child in children.tolist())

    def reorder(self) -> None:
        """A beam search step."""
        handles = self.pick(4, self.idle())
        self.manager.reorder(handles, self.rng.integers(0, len(handles) or 1, len(handles), dtype=np.int32))
        self.operations += 1

    def drop_range(self) -> None:
        """A window moves on."""
        for handle in self.pick(1, self.idle()):
            computed = self.manager.sequence(handle).num_computed
            start, end = sorted(self.rng.integers(0, computed + 1, 2).tolist())
            self.manager.drop_range(handle, start, end, unpublish=bool(self.rng.integers(2)))
            self.operations += 1

    def move_slots(self) -> None:
        """The second half of a step is what is accepted of a draft tree."""
        for handle in self.pick(1, [handle for handle, steps in self.steps.items() if steps]):
            num_new = self.steps[handle][0]
            accepted = np.arange(num_new // 2, num_new, dtype=np.int32)
            moves = self.manager.move_slots(handle, len(accepted), accepted)
            assert len(moves) in (0, len(accepted))
            self.operations += 1

    def declare(self) -> None:
        """How long a sequence may become."""
        most = min(MAX_LENGTH, self.manager.capacity_blocks * self.manager.block_size)
        self.manager.set_max_tokens(self.pick(2), int(self.rng.integers(0, most + 1)))
        self.operations += 1

    def preempt(self) -> None:
        """Take the blocks of a few away."""
        handles = self.pick(2)
        for handle, prompt in zip(handles, self.manager.preempt(handles), strict=True):
            del self.steps[handle]
            self.preempted[handle] = prompt
        self.operations += 1

    def resume(self) -> None:
        """Go on with a preempted sequence."""
        for handle in self.pick(1, list(self.preempted)):
            self.operations += 1
            if self.manager.allocate(self.preempted[handle]):
                del self.preempted[handle]
                self.steps[handle] = []

    def free(self) -> None:
        """End some sequences, preempted ones too."""
        handles = self.pick(6, [*self.steps, *self.preempted])
        self.manager.free(handles)
        self.operations += 1
        for handle in handles:
            self.steps.pop(handle, None)
            self.preempted.pop(handle, None)

    def begin_transfer(self) -> None:
        """Of a part of a sequence."""
        if len(self.transfers) == MAX_TRANSFERS:
            self.end_transfer()
        for handle in self.pick(1):
            columns = self.manager.sequence(handle).num_blocks
            start, end = sorted(self.rng.integers(0, columns + 1, 2).tolist())
            self.transfers.append(self.manager.begin_transfer(handle, start, end))
            self.operations += 1

    def end_transfer(self) -> None:
        """In one of the three ways."""
        if self.transfers:
            transfer = self.transfers.pop(int(self.rng.integers(len(self.transfers))))
            ends = (
                self.manager.complete_transfer,
                self.manager.fail_transfer,
                self.manager.cancel_transfer,
            )
            ends[int(self.rng.integers(3))](transfer)
            self.operations += 1

    def look(self) -> None:
        """What may be read at any time."""
        handles = self.pick(3)
        usage = self.manager.sequence_usage(handles)
        assert usage.reclaimable_blocks <= usage.private_blocks <= usage.live_blocks
        assert usage.used_slots <= usage.allocated_slots
        assert len(self.manager.pending_transfers()) == len(self.transfers)
        for handle in handles:
            cursors = self.manager.sequence(handle)
            assert len(self.manager.tokens(handle)) == cursors.num_tokens
            assert len(self.manager.block_table(handle)) == cursors.num_blocks
        stats = self.manager.stats()
        base = self.manager.namespace_usage()
        assert base.live_blocks <= stats.live_blocks
        assert base.queried_tokens <= stats.queried_tokens
        parts = stats.free_blocks + stats.live_blocks + stats.cached_blocks + stats.held_blocks
        assert parts == stats.capacity_blocks
        assert self.manager.fragmentation().free_blocks == stats.free_blocks
        self.operations += 5

    def forget(self) -> None:
        """Drop cached content, rarely."""
        if self.rng.random() < 0.05:
            self.manager.reset_prefix_cache()
            self.operations += 1
        elif self.rng.random() < 0.1:
            self.manager.drop_namespace(salt="tenant")
            self.operations += 1


def rss_bytes() -> int:
    """Resident set of this process."""
    return 4096 * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def main() -> int:
    """Soak, print one line for each tenth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("operations", type=int, help="calls of verbs, over all managers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=2000, help="operations between integrity checks")
    parser.add_argument("--limit-mib", type=float, default=2.0, help="most that the resident set may grow by")
    options = parser.parse_args()

    drivers = [
        Driver(options.seed + number, (16, 1, 5, 16, 8, 3)[number], chosen)
        for number, chosen in enumerate(OPTIONS)
    ]
    violations: list[str] = []
    resident: list[int] = []
    total = checks = 0
    start = time.monotonic()
    while total < options.operations and not violations:
        for driver in drivers:
            driver.run(min(options.check_every, options.operations))
            violations += driver.manager.check_integrity()
            checks += 1
        total = sum(driver.operations for driver in drivers)
        if total * 10 // options.operations > len(resident):
            resident.append(rss_bytes())
            print(
                f"{total:>12,} operations, {checks:,} integrity checks, {len(violations)} violations, "
                f"resident {resident[-1] / 2**20:.1f} MiB, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    for driver in drivers:
        violations += driver.finish()
    counted = [driver.manager.stats() for driver in drivers]
    for name in ("evicted_blocks", "copied_blocks", "preemptions", "hit_requests", "completed_transfers"):
        seen = sum(getattr(stats, name) for stats in counted)
        print(f"{name} {seen:,}")
        if seen == 0:
            violations.append(f"the run was too short to see any {name}")
    grown = (resident[-1] - resident[0]) / 2**20
    for violation in violations[:20]:
        print(violation)
    print(f"{total:,} operations, {len(violations)} violations, resident set grown by {grown:+.2f} MiB")
    return int(bool(violations) or grown > options.limit_mib)


if __name__ == "__main__":
    sys.exit(main())
