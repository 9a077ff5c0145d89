"""How long `kvblocks replay` takes for an hour of a real trace: the Mooncake conversation trace at blocks of 16.

Guards: steps in which nobody comes or goes are taken together. The goal is 5 s for one policy and pool on one core;
`time_prompts_only` is the allocator's share, in the same run.
"""

from kvblocks.replay.hit_rate import lru_hit_rate
from kvblocks.replay.scenario import Options, Scenario, run_scenario
from kvblocks.replay.simulate import Engine
from kvblocks.traces.readers import read_trace

from .mooncake import trace_path

BLOCK_SIZE = 16


class Mooncake:
    """12,031 requests, 9 million blocks of prompts, 4 million decoded tokens."""

    params = (("paged", "prefix"), ("arrivals", "saturated"), (65_536, 1_048_576))
    param_names = ("policy", "mode", "num_blocks")
    timeout = 300
    number = 1
    repeat = 2

    def setup(self, policy: str, mode: str, num_blocks: int) -> None:
        """Read the trace; skip where it is not."""
        path = trace_path()
        if path is None:
            raise NotImplementedError("KVBLOCKS_TRACES names no folder with the Mooncake conversation trace")
        self.trace = read_trace(path)
        self.scenario = Scenario(
            policy, BLOCK_SIZE, num_blocks * BLOCK_SIZE, int(self.trace.final_tokens.max())
        )
        self.engine = (
            Engine("saturated") if mode == "saturated" else Engine("arrivals", 60_000.0, step_tokens=16_384)
        )

    def time_replay(self, policy: str, mode: str, num_blocks: int) -> None:
        """One policy and pool."""
        result = run_scenario(self.trace, self.scenario, self.engine, Options())
        assert result.completed == len(self.trace)

    def time_prompts_only(self, policy: str, mode: str, num_blocks: int) -> None:
        """The reference: prompts one at a time through the manager, no decoding, no accounts."""
        lru_hit_rate(self.trace, BLOCK_SIZE, num_blocks)
