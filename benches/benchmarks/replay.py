"""How long `kvblocks replay` takes for an hour of a real trace: the Mooncake conversation trace at blocks of 16.

Guards: steps in which nobody comes or goes are taken together. The goal is 5 s for one policy and pool on one core;
`MooncakePrompts` is the allocator's share, in the same run.
"""

from kvblocks.replay.hit_rate import lru_hit_rate
from kvblocks.replay.scenario import Options, Scenario, run_scenario
from kvblocks.replay.simulate import Engine
from kvblocks.traces.readers import read_trace

from .mooncake import trace_path

BLOCK_SIZE = 16


class _Trace:
    timeout = 300
    number = 1
    repeat = 2

    def read(self) -> None:
        """Read the trace; skip where it is not."""
        path = trace_path()
        if path is None:
            raise NotImplementedError("KVBLOCKS_TRACES names no folder with the Mooncake conversation trace")
        self.trace = read_trace(path)

    def teardown(self, *_params: object) -> None:
        """Let the trace go; each run makes a pool of its own."""
        del self.trace


class Mooncake(_Trace):
    """12,031 requests, 9 million blocks of prompts, 4 million decoded tokens; a short pool, and ample ones."""

    params = ("prefix arrivals 65536", "prefix arrivals 1048576", "paged saturated 1048576")
    param_names = ("policy, mode, blocks",)

    def setup(self, case: str) -> None:
        """Read the trace."""
        self.read()
        policy, mode, num_blocks = case.split()
        longest = int(self.trace.final_tokens.max())
        self.scenario = Scenario(policy, BLOCK_SIZE, int(num_blocks) * BLOCK_SIZE, longest)
        self.engine = Engine() if mode == "saturated" else Engine("arrivals", 60_000.0, step_tokens=16_384)

    def time_replay(self, case: str) -> None:
        """One policy and pool."""
        result = run_scenario(self.trace, self.scenario, self.engine, Options())
        assert result.completed == len(self.trace)


class MooncakePrompts(_Trace):
    """The reference: prompts one at a time through the manager, no decoding, no accounts."""

    params = (65_536, 1_048_576)
    param_names = ("num_blocks",)

    def setup(self, num_blocks: int) -> None:
        """Read the trace."""
        self.read()

    def time_prompts_only(self, num_blocks: int) -> None:
        """One pool."""
        lru_hit_rate(self.trace, BLOCK_SIZE, num_blocks)
