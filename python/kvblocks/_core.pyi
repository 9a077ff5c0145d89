"""The Rust core seen from Python: the block manager, its step, and what they answer.

Handles are int64 (generation << 32 | index). Wherever a method takes `handles` it accepts an int64 array [n],
a list of ints or one int; counts and lengths are int32 arrays [n], lists of ints, or one int for all; token
ids are int32 or int64 arrays or lists. Arrays of another dtype are refused (TypeError), never cast.

Every method may be called from any thread. Every method is all-or-nothing: after an exception or a refusal
(`Later`, `Never`) nothing has changed.
"""

from collections.abc import Sequence as _Seq
from typing import Any, Literal, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

_Handles: TypeAlias = NDArray[np.int64] | _Seq[int] | int
_Counts: TypeAlias = NDArray[np.int32] | _Seq[int] | int
_Key: TypeAlias = str | bytes | int | bool
_Media: TypeAlias = _Seq[tuple[_Key, int, int]]
_Tokens: TypeAlias = NDArray[np.int32] | NDArray[np.int64] | _Seq[int]

class _ScheduleOptions(TypedDict, total=False):
    """How a step is scheduled; see `StepBuffers.schedule`."""

    lookahead: _Counts
    policy: Literal["all", "fit"]
    pad_seqs: int
    pad_tokens: int
    append: bool

__version__: str

class KVBlocksError(Exception):
    """Base of the errors that are about the state of a manager."""

class StaleHandleError(KVBlocksError):
    """A handle that names no sequence (or no transfer): never given out, freed, ended, or of the other kind."""

class PreemptedError(KVBlocksError):
    """A verb that needs blocks was called on a preempted sequence."""

class ForkedProcessError(KVBlocksError):
    """A manager made before fork() was touched in the child process."""

@final
class Prompt:
    """Token ids with their block hashes, computed once by `prepare` (or handed out by `preempt`); immutable."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def handle(self) -> int | None:
        """The preempted sequence that `allocate` of this prompt continues; None for a new request."""
    @property
    def tokens(self) -> NDArray[np.int64]:
        """Token ids [num_tokens]; a copy. O(tokens)."""
    @property
    def block_hashes(self) -> NDArray[np.uint8]:
        """Digests of the full blocks [num_blocks, 16 or 32 bytes]; no rows when the prefix cache is off."""
    def __len__(self) -> int: ...

@final
class Ok:
    """Yes (true): what `allocate` would do now."""

    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_new_blocks(self) -> int: ...
    def __bool__(self) -> Literal[True]: ...

@final
class Allocated:
    """Admitted (true)."""

    @property
    def handle(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens whose compute is skipped: their K/V is already in the cache."""
    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens left to compute; num_cached_tokens + num_new_tokens == prompt.num_tokens."""
    def __bool__(self) -> Literal[True]: ...

@final
class Later:
    """Not now (false): `num_blocks` blocks short."""

    @property
    def num_blocks(self) -> int: ...
    def __bool__(self) -> Literal[False]: ...

@final
class Never:
    """Cannot fit even in an empty pool (false)."""

    @property
    def need_blocks(self) -> int: ...
    @property
    def capacity_blocks(self) -> int: ...
    def __bool__(self) -> Literal[False]: ...

@final
class Scheduled:
    """What a step holds; true if the whole batch was scheduled."""

    @property
    def num_seqs(self) -> int:
        """Rows scheduled: all, none (policy "all"), or the longest prefix that fits (policy "fit")."""
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def num_changes(self) -> int: ...
    @property
    def max_blocks(self) -> int:
        """Length of the longest block table of the step."""
    @property
    def refusal(self) -> Later | Never | None:
        """Why row `num_seqs` was not scheduled; `Later(0)`: not in this step, whose arrays are full."""
    def __bool__(self) -> bool: ...

@final
class Sequence:
    """A snapshot of one sequence's cursors, all in tokens but `num_blocks`."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
    @property
    def num_computed(self) -> int: ...
    @property
    def num_scheduled(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def is_preempted(self) -> bool: ...

@final
class Freed:
    """What `free` gave back."""

    @property
    def num_blocks(self) -> int:
        """Blocks that nobody owns any more."""
    @property
    def num_deferred(self) -> int:
        """Blocks that transfers still own: they come back when those end."""
    def __bool__(self) -> Literal[True]: ...

@final
class Dropped:
    """What `drop_range` took out: the block-aligned range of token positions, empty if start == end."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def num_blocks(self) -> int:
        """Blocks that nobody owns any more."""
    def __bool__(self) -> Literal[True]: ...

class _Usage:
    """What `Usage` and `Stats` have both; no class of its own at run time."""

    @property
    def live_blocks(self) -> int:
        """Blocks that sequences own, each counted once."""
    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody owns and whose content can still be hit; reclaimable at any time."""
    @property
    def held_blocks(self) -> int:
        """Blocks that only transfers own."""
    @property
    def logical_blocks(self) -> int:
        """Blocks named by all block tables together."""
    @property
    def promised_blocks(self) -> int:
        """Blocks that sequences with a declared maximum may still ask for."""
    @property
    def num_seqs(self) -> int:
        """Sequences that hold a handle, preempted ones included."""
    @property
    def used_slots(self) -> int:
        """Slots of live blocks that hold a computed token, shared blocks counted once."""
    @property
    def allocated_slots(self) -> int:
        """live_blocks * block_size."""
    @property
    def reserved_slots(self) -> int:
        """Slots reserved beyond what is scheduled, over all sequences: chunks to come, look-ahead."""
    @property
    def peak_live_blocks(self) -> int:
        """Since `reset_peaks`."""
    @property
    def peak_logical_blocks(self) -> int: ...
    @property
    def queried_requests(self) -> int:
        """Admissions that looked the prefix cache up, re-admissions after a preemption not counted."""
    @property
    def queried_blocks(self) -> int:
        """Their full blocks."""
    @property
    def queried_tokens(self) -> int: ...
    @property
    def hit_requests(self) -> int:
        """Those that found something."""
    @property
    def hit_blocks(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def readmit_requests(self) -> int:
        """Admissions of preempted sequences; they hit their own blocks, so they are counted apart."""
    @property
    def readmit_queried_blocks(self) -> int: ...
    @property
    def readmit_queried_tokens(self) -> int: ...
    @property
    def readmit_hit_requests(self) -> int: ...
    @property
    def readmit_hit_blocks(self) -> int: ...
    @property
    def readmit_hit_tokens(self) -> int: ...
    @property
    def collided_requests(self) -> int:
        """Admissions that met a block with an equal hash and other content (and did not hit it)."""
    @property
    def collided_blocks(self) -> int:
        """Those blocks."""
    @property
    def collided_tokens(self) -> int: ...
    @property
    def evicting_requests(self) -> int:
        """Admissions, and rows of steps, that made cached blocks give way."""
    @property
    def evicted_blocks(self) -> int:
        """Cached blocks that gave way; of a namespace: its own, whoever needed them."""
    @property
    def evicted_tokens(self) -> int: ...
    @property
    def copied_blocks(self) -> int:
        """Copy-on-write copies requested."""
    @property
    def preemptions(self) -> int: ...
    @property
    def reclaimable_blocks(self) -> int:
        """Blocks that the next request may have beside the free ones: the cached ones."""
    @property
    def internal_fragmentation(self) -> float:
        """1 - used_slots / allocated_slots; 0.0 if there are none."""
    @property
    def sharing(self) -> float:
        """logical_blocks / live_blocks; 1.0 if there are none."""

@final
class Usage(_Usage):
    """What one namespace uses now, has used at most, and has asked for so far; O(1) to take."""

    def __bool__(self) -> Literal[True]: ...

@final
class SequenceUsage:
    """What a group of sequences uses now."""

    @property
    def live_blocks(self) -> int:
        """Blocks that they own, each counted once."""
    @property
    def shared_blocks(self) -> int:
        """Those of them that other sequences own too."""
    @property
    def private_blocks(self) -> int:
        """Those that no other sequence owns."""
    @property
    def reclaimable_blocks(self) -> int:
        """Those that `free` of exactly these sequences would give back now: not shared, in no transfer."""
    @property
    def logical_blocks(self) -> int:
        """Blocks named by their tables together."""
    @property
    def used_slots(self) -> int:
        """Slots of their blocks that hold a computed token, of whatever owner."""
    @property
    def allocated_slots(self) -> int:
        """live_blocks * block_size."""
    @property
    def reserved_slots(self) -> int:
        """Slots reserved beyond what is scheduled: chunks to come, look-ahead."""
    @property
    def internal_fragmentation(self) -> float:
        """1 - used_slots / allocated_slots; 0.0 if there are none."""
    @property
    def sharing(self) -> float:
        """logical_blocks / live_blocks; 1.0 if there are none."""
    def __bool__(self) -> Literal[True]: ...

@final
class Fragmentation:
    """Where the free blocks lie; paged allocation does not care, whoever shrinks a pool does."""

    @property
    def free_blocks(self) -> int: ...
    @property
    def num_runs(self) -> int:
        """Runs of consecutive free ids."""
    @property
    def longest_run_blocks(self) -> int: ...
    @property
    def run_histogram(self) -> NDArray[np.int64]:
        """Runs by length: entry i counts those of 2**i to 2**(i + 1) - 1 blocks."""

@final
class Stats(_Usage):
    """A snapshot of the pool's counters, O(1) to take: what `Usage` has, of all namespaces, and some more."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can be allocated: num_blocks, less the null block."""
    @property
    def free_blocks(self) -> int: ...
    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
    @property
    def num_steps(self) -> int:
        """Steps scheduled."""
    @property
    def completed_transfers(self) -> int: ...
    @property
    def failed_transfers(self) -> int: ...
    @property
    def cancelled_transfers(self) -> int: ...

@final
class BlockManager:
    """Owns the block ids of one paged KV cache: block tables, sharing, prefix cache. It never touches
    tensors.

    num_blocks: blocks of storage, ids 0..num_blocks; block 0 is the null block unless `null_block=False`.
    block_size: tokens per block, any integer >= 1.
    watermark_blocks: blocks that admissions leave free for running sequences; never binds `schedule`, nor the
    only sequence.
    seed: of the block hashes; random by default. Block ids never depend on it.
    algorithm: "xxh3" (128 bits), or "sha256" for digests that leave the process. Content is compared on a hit.
    full_hit: what a prompt that is cached as a whole leaves to compute: its last "block", or its last "token", for
    which the last block is copied on write.
    publish: a block can be hit once its step is committed ("commit"), or already once it is scheduled and its ids
    are known ("schedule"), by requests admitted after that: then a scheduled step must run or be aborted.
    merge: let a sequence give up a block whose content an older block has, and use that one.
    reuse: of blocks without content, "last_freed" first and cached blocks last; or "first_freed" of all, cached or
    not, as engines with one queue do.
    series_every, series_len: sample the counters every so many steps (0: never), keep so many samples.
    """

    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        watermark_blocks: int = 0,
        null_block: bool = True,
        seed: int | None = None,
        algorithm: Literal["xxh3", "sha256"] = "xxh3",
        full_hit: Literal["block", "token"] = "block",
        publish: Literal["commit", "schedule"] = "commit",
        merge: bool = False,
        reuse: Literal["last_freed", "first_freed"] = "last_freed",
        series_every: int = 0,
        series_len: int = 1024,
    ) -> BlockManager: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def capacity_blocks(self) -> int: ...
    @property
    def null_block_id(self) -> int:
        """What pads block tables: 0, or -1 without a null block."""
    @property
    def seed(self) -> int:
        """Of the block hashes: routers and stores that compute them need it."""
    def prepare(
        self,
        tokens: _Tokens,
        *,
        adapter: _Key | None = None,
        salt: _Key | None = None,
        media: _Media | None = None,
    ) -> Prompt:
        """Hash a prompt once, for any number of later look-ups.

        Prompts share blocks only under equal keys. adapter: the weights that compute the K/V. salt: the tenant,
        chosen by the trusted side. Both hold for the whole prompt and are its namespace. media: (digest, start,
        length) of items whose placeholder tokens stand at start..start + length; a digest of full width. Items
        of one digest and different spans differ. Keys of different types differ. Raises ValueError for empty
        keys and for media outside the prompt, MemoryError where the digests do not fit. O(tokens); releases the
        interpreter for long prompts.
        """
    def match_prefix(self, prompt: Prompt, *, recompute_last_hit: bool = False) -> int:
        """Leading tokens that `allocate` would find cached; no side effects. O(hit blocks)."""
    def can_allocate(
        self,
        prompt: Prompt,
        reserve: int | None = None,
        *,
        use_cache: bool = True,
        recompute_last_hit: bool = False,
        max_tokens: int | None = None,
        max_resident_blocks: int | None = None,
    ) -> Ok | Later | Never:
        """What `allocate` with the same arguments would answer. O(hit blocks).

        With reserve or max_tokens = prompt + new tokens it answers whether a request can ever be served.
        """
    def allocate(
        self,
        prompt: Prompt,
        reserve: int | None = None,
        *,
        use_cache: bool = True,
        recompute_last_hit: bool = False,
        max_tokens: int | None = None,
        max_resident_blocks: int | None = None,
    ) -> Allocated | Later | Never:
        """Admit a request: pin its cached prefix, then take blocks for its first `reserve` tokens.

        reserve: the whole prompt by default; fewer for a chunk, more for room to grow. max_tokens: how long the
        sequence may become; room for it is kept from later admissions. recompute_last_hit: leave the last block
        that was found to be computed again. max_resident_blocks: the most blocks it ever holds at once, 1 or more,
        where `drop_range` takes out what a window leaves behind; both maxima are remembered over a preemption. At least
        one token is always left to compute, see `full_hit`. A prompt handed out by `preempt` continues its own
        handle. Never is judged on reserve, and on the whole prompt and max_tokens as far as they are resident;
        Later on what must be free now. Raises StaleHandleError if the preempted sequence was freed
        or already resumed. O(blocks).
        """
    def commit(self, handles: _Handles, counts: _Counts, tokens: _Tokens | None = None) -> None:
        """Accept the first `counts[i]` tokens of the oldest uncommitted step of each sequence.

        tokens: ids, flat, in row order, of the accepted tokens that are not known yet (the prompt's are), or of
        all accepted tokens, of which the known ones must be the same. Blocks filled by them are published in the
        prefix cache. The rest of the step (rejected drafts) is rolled back and its blocks are returned. Call it
        once the step that writes is ordered before any later reader. Raises ValueError if a count exceeds the
        step, if ids are missing, superfluous or different, or if tokens would be rejected while a later step is
        in flight. O(accepted tokens).
        """
    def abort_step(self, handles: _Handles) -> None:
        """Take back the newest step of each sequence, which must not have run, as if it had not been scheduled.

        Its copies are not taken back: they still have to run before the next step's writes. Raises ValueError
        without a step in flight, and if others have hit blocks that it had published: free or preempt those
        first. O(its blocks).
        """
    def fork(self, handles: _Handles, num_children: _Counts = 1) -> NDArray[np.int64]:
        """Snapshot each sequence's computed tokens into children that share its blocks; copies nothing.

        Returns the children's handles [sum(num_children)], grouped by parent. A partly filled block is copied
        when one of its owners is next scheduled into it; the last owner writes in place. O(blocks).
        """
    def reorder(self, handles: _Handles, parents: NDArray[np.int32] | _Seq[int]) -> None:
        """Let sequence i continue what sequence `parents[i]` (a row of the batch) has computed: beam search.

        All are replaced at once; the handles stay. Raises ValueError with steps in flight. O(blocks).
        """
    def truncate(
        self, handles: _Handles, lengths: _Counts, *, spare: Literal["free", "keep"] = "free"
    ) -> int:
        """Cut each sequence to its first `lengths[i]` tokens; returns the blocks that no sequence uses any
        more.

        spare="keep" keeps the private, unpublished blocks beyond the cut in the table. Raises ValueError for a
        length beyond the sequence or below a step in flight. O(blocks given back).
        """
    def drop_range(self, handle: int, start: int, end: int, *, unpublish: bool = False) -> Dropped:
        """Take the computed blocks wholly within positions start..end out of a sequence, as a window moves on.

        Positions and num_tokens stay; tables show the null block there. unpublish: those that nobody else owns
        cannot be hit any more. Raises ValueError for a range outside the sequence. O(blocks of the table).
        """
    def move_slots(
        self, handles: _Handles, counts: _Counts, accepted: NDArray[np.int32] | _Seq[int]
    ) -> NDArray[np.int64]:
        """Slots (src, dst) [m, 2] to copy so that the accepted tokens of a draft tree stand in a row.

        accepted: flat by counts, increasing indices within the oldest step of each sequence. Changes nothing;
        commit the counts afterwards. A slot may be both src and dst: copy in order, or read all first.
        """
    def set_max_tokens(self, handles: _Handles, max_tokens: _Counts) -> None:
        """Declare how long sequences may become; admissions keep room. O(n).

        At most what the pool can hold, but for sequences with a max_resident_blocks.
        """
    def preempt(self, handles: _Handles) -> list[Prompt]:
        """Give the blocks back and hand out each token history; the handle stays, to be resumed by
        `allocate`.

        Steps in flight are dropped. Preempting a preempted sequence hands out the same history; a prompt from an
        earlier preemption is stale once the sequence was resumed. Dropped ranges have to be computed again; where
        the whole history is longer than the pool, `allocate` needs a reserve and a max_resident_blocks. O(tokens).
        """
    def free(self, handles: _Handles, *, missing_ok: bool = False) -> Freed:
        """End sequences. Legal at any stage.

        Published blocks stay cached, the tail first in line for eviction; blocks in a transfer come back when it
        ends. Raises StaleHandleError, unless missing_ok. O(blocks).
        """
    def reclaimable(self, handles: _Handles) -> int:
        """Blocks that `free` of exactly these sequences would give back now. O(blocks)."""
    def sequence_usage(self, handles: _Handles) -> SequenceUsage:
        """What these sequences use together, each block counted once. O(blocks); no verb pays for it."""
    def begin_transfer(self, handle: int, start: int | None = None, end: int | None = None) -> int:
        """Let a transfer own the blocks of columns start..end (default: all) of a sequence's table.

        Returns its handle. It keeps them until it ends, whatever happens to the sequence. Meanwhile a write into a
        partly filled one copies it first, so end a load before its blocks are scheduled. O(blocks).
        """
    def complete_transfer(self, transfer: int) -> int:
        """End a transfer that has arrived; returns the blocks that nobody owns any more.

        Raises StaleHandleError for one that has ended already. O(blocks).
        """
    def fail_transfer(self, transfer: int) -> int:
        """End a transfer that broke off; as `complete_transfer`, counted apart."""
    def cancel_transfer(self, transfer: int) -> int:
        """End a transfer that was called off; as `complete_transfer`, counted apart."""
    def pending_transfers(self) -> NDArray[np.int64]:
        """Transfers that have not ended [n, 3]: handle, blocks, steps scheduled since it began."""
    def sequence(self, handle: int) -> Sequence:
        """The cursors of a sequence, O(1)."""
    def block_table(self, handle: int) -> NDArray[np.int32]:
        """Block ids [num_blocks] of a sequence; a copy."""
    def tokens(self, handle: int) -> NDArray[np.int64]:
        """Known token ids [num_tokens] of a sequence; a copy. O(tokens)."""
    def namespace_usage(self, *, adapter: _Key | None = None, salt: _Key | None = None) -> Usage:
        """What a namespace uses and has asked for; no keys: the default one. O(1).

        Its totals last while something belongs to it, and afterwards until 4,096 other namespaces have become empty
        since; zeros for one that is not known. Raises ValueError for empty keys.
        """
    def fragmentation(self) -> Fragmentation:
        """Where the free blocks lie. O(num_blocks / 64 + runs)."""
    def series(self) -> NDArray[np.int64]:
        """The samples kept, oldest first [n, 7].

        Columns: step; live, cached, free and held blocks; used slots; logical blocks. O(samples).
        """
    def stats(self) -> Stats:
        """Counters of the pool, O(1)."""
    def reset_peaks(self) -> None:
        """Start the peaks, those of the namespaces too, afresh from the current use. O(namespaces)."""
    def reset_prefix_cache(self) -> int:
        """Forget every cached block that nobody owns; returns how many. O(cached blocks)."""
    def drop_namespace(self, *, adapter: _Key | None = None, salt: _Key | None = None) -> int:
        """Make all blocks under an adapter, a salt, or both unfindable; returns how many, those in use included.

        What sequences under it compute from now on is not published either, until they are preempted and
        computed anew. Raises ValueError without a key, and for empty ones. O(num_blocks); releases the interpreter.
        """
    def check_integrity(self) -> list[str]:
        """Recompute every counter and list from scratch; the violations found, empty when sound. O(capacity)."""

@disjoint_base
class StepBuffers:
    """The caller's index arrays of steps, filled by `schedule` in one call; the memory is kept and cannot be resized.

    memory: int64 [layout(..)["num_words"]] each, C-contiguous and writable, no two of which share bytes; steps use
    them in turn. Pinned memory is as good as any. Each holds, at the places that `layout` tells, slot_mapping int64
    [max_tokens], positions int32 [max_tokens], seq_lens int32 [max_seqs], query_start_loc int32 [max_seqs + 1], copies
    int32 [max_seqs, 2], changes int32 [max_seqs, 3] and, last, block_tables int32 [max_seqs, max_blocks_per_seq].
    Raises ValueError for other lengths, and for sizes beyond int32.
    """

    def __init__(
        self,
        manager: BlockManager,
        memory: _Seq[NDArray[np.int64]],
        max_seqs: int,
        max_tokens: int,
        max_blocks_per_seq: int,
    ) -> None: ...
    @staticmethod
    def layout(max_seqs: int, max_tokens: int, max_blocks_per_seq: int) -> dict[str, Any]:
        """Places of the arrays: name -> (first byte, byte after the last), and "num_words"."""
    @property
    def current(self) -> int:
        """Which of the `memory` holds the last step that was scheduled."""
    @property
    def num_rows(self) -> int:
        """Rows of that step, padding included."""
    @property
    def num_tokens(self) -> int:
        """Tokens of that step, padding included."""
    @property
    def num_cols(self) -> int:
        """Its longest block table, in blocks."""
    @property
    def num_copies(self) -> int:
        """Its pairs in `copies`."""
    @property
    def num_changes(self) -> int:
        """Its triples in `changes`."""
    def schedule(
        self,
        handles: _Handles,
        num_new: _Counts,
        *,
        lookahead: _Counts = 0,
        policy: Literal["all", "fit"] = "all",
        pad_seqs: int = 0,
        pad_tokens: int = 0,
        append: bool = False,
    ) -> Scheduled:
        """Schedule the next `num_new[i]` tokens of each sequence and write the step's index arrays.

        Reserves `lookahead[i]` slots beyond them. Transactional: all rows, or under "fit" the longest prefix
        that fits, into the pool and into the buffers. Rows up to pad_seqs get length 0 and a null table, tokens
        up to pad_tokens slot -1. A row that holds the same sequence as in the last call is updated in its
        changed columns only. append: add the rows to the step that the buffers hold, not padded yet, and
        answer for the whole of it; so that requests which hit what its rows publish when scheduled run in the
        same step. A row that would have to copy a block is then refused with `Later(0)`. Raises ValueError if
        the batch, or under "fit" a single row, exceeds the buffers, and for a sequence that the step has already;
        append also if a row of the step was freed, preempted, committed, taken back or given other blocks since.
        The step's copies must run, for all layers, before its K/V is written.
        O(sequences of the step + tokens + changed columns).
        """

# The kernels of rust/kvblocks-cpu, for kvblocks.backends.cpu, which checks their arguments. Arrays have one
# axis and are contiguous; 16-bit elements come as uint16 bits, with the name of their dtype beside them.

_Elements: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
# (block, token, head strides, num_blocks, block_size, num_heads, head_dim), in elements.
_Geometry: TypeAlias = tuple[int, ...]

# The instruction set and the number of threads that a call runs with.
_How: TypeAlias = tuple[str, int]
# An array and the name of its dtype; of K or V, its geometry too.
_Rows: TypeAlias = tuple[_Elements, str]
_Storage: TypeAlias = tuple[_Elements, str, _Geometry]

def cpu_simd() -> list[str]:
    """The instruction sets that there are kernels for and that this processor has, the widest first."""

def cpu_read_all(elements: NDArray[np.float32], how: _How) -> float:
    """Read every element once, as a measure of what memory gives; returns a number without meaning."""

def cpu_read_blocks(
    elements: NDArray[np.float32], block_len: int, table: NDArray[np.int32], how: _How
) -> float:
    """The same of the blocks of `block_len` elements that a table `[n]` names, in its order.

    Raises ValueError where it names no block.
    """

# Who shares a scale, scales, zeros, size of a group, bits of a code.
_Scales: TypeAlias = tuple[str, NDArray[Any], NDArray[Any] | None, int, int] | None
_Part: TypeAlias = tuple[_Storage, _Scales]

def cpu_write(
    cache: _Storage, scales: _Scales, rows: _Rows, slots: NDArray[np.int64], losses: bool, how: _How
) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
    """Store rows in K or V: cache (array, dtype, geometry), rows (array, dtype).

    Scales of "made" and of groups are written, others are read. With `losses`, by head: the largest finite magnitudes,
    and how many values no code reaches.
    """

def cpu_amax(rows: _Rows, num_columns: int, how: _How) -> NDArray[np.float32]:
    """The largest finite magnitude in each column of rows (array, dtype) of so many columns."""

def cpu_attend(
    q: tuple[_Elements, str, int],
    k: _Part,
    v: _Part,
    tail: tuple[_Elements, _Elements, str, NDArray[np.int32]] | None,
    batch: tuple[NDArray[np.int32], int, NDArray[np.int32], NDArray[np.int32]],
    options: tuple[float, int | None, float | None, NDArray[np.float32] | None, NDArray[np.float32] | None],
    output: tuple[_Elements, NDArray[np.float32] | None],
    how: _How,
) -> None:
    """Attention of q (array, dtype, heads) over K and V, and over a tail (k, v, dtype, starts) that is not in them yet.

    batch: (tables, columns, lengths, query starts); options: (scale, window, soft cap, sinks, slopes);
    output: (out, lse).
    """

def cpu_copy_blocks(cache: _Storage, copies: NDArray[np.int32], how: _How) -> None:
    """Copy blocks of K or V of one layer, cache (array, dtype, geometry); copies: (src, dst) pairs, flat."""

def cpu_gather(
    cache: _Part, block_table: NDArray[np.int32], seq_len: int, out: NDArray[np.float32], how: _How
) -> None:
    """The first seq_len tokens of a sequence, from K or V, into out."""

def cpu_merge_states(
    a: tuple[_Elements, NDArray[np.float32]],
    b: tuple[_Elements, NDArray[np.float32]],
    dtype: str,
    head_dim: int,
    output: tuple[_Elements, NDArray[np.float32]],
    how: _How,
) -> None:
    """Merge the states a and b, each (out, lse), into output (out, lse)."""

def block_hashes(
    tokens: _Tokens,
    block_size: int,
    *,
    seed: int,
    algorithm: Literal["xxh3", "sha256"] = "xxh3",
    parent: bytes | None = None,
    adapter: _Key | None = None,
    salt: _Key | None = None,
    media: _Media | None = None,
) -> NDArray[np.uint8]:
    """Digests of the full blocks of a prompt [n, 16 or 32 bytes], as a manager with this seed gives them.

    parent: the digest of an earlier block, to go on from it; media positions then count from its end, and the
    namespace is in it already. The encoding is documented in docs/hashing.md. Raises MemoryError where the digests do
    not fit. O(tokens); releases the interpreter for long prompts.
    """

def look_at_tensors(api: object, kind: type, tensors: tuple[Any, ...]) -> tuple[list[int], bytes]:
    """The addresses of a library's tensors, 0 for None, and all else that tells them apart.

    That is dtypes, devices, shapes, strides, and how far each address is from a multiple of 16. api: the capsule
    `kind.__dlpack_c_exchange_api__` of DLPack 1. Raises TypeError for an object of another type than kind, ValueError
    for another version, and what the library raises for a tensor that it cannot describe.
    """
