"""What is left for the cache: the budget, term by term.

Owns `Budget`. All sizes are bytes on one GPU.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Budget:
    """min(total x utilisation, free at start) - weights - activations - graphs - safety, all in bytes of one GPU.

    utilisation: the part of the card that the engine may take. free_bytes: what is free before the engine starts;
    None: all. graphs_bytes: captured CUDA graphs. safety_bytes: kept back for what nobody measured.
    """

    total_bytes: int
    utilisation: Fraction
    weights_bytes: int
    activations_bytes: int = 0
    graphs_bytes: int = 0
    safety_bytes: int = 0
    free_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """min(total x utilisation, free at start), a fraction of a byte dropped."""
        usable = int(self.total_bytes * self.utilisation)
        return usable if self.free_bytes is None else min(usable, self.free_bytes)

    @property
    def cache_bytes(self) -> int:
        """What the cache may take; negative where the rest does not even fit."""
        return self.usable_bytes - sum(num_bytes for _, num_bytes in self.deductions())

    def deductions(self) -> list[tuple[str, int]]:
        """The terms that are taken from what is usable."""
        return [
            ("weights", self.weights_bytes),
            ("activations", self.activations_bytes),
            ("graphs", self.graphs_bytes),
            ("safety", self.safety_bytes),
        ]
