"""Known GPUs, and the memory that their driver reports.

Owns `CARDS`. Data sheets round: a card "with 80 GB" has 79.6 or 80.0 GiB. The figures are `memory.total` as
nvidia-smi prints it in MiB (ECC on where the card has it), for AMD the bytes that rocm-smi prints.
"""

from dataclasses import dataclass
from typing import Final

_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Card:
    """A GPU: bytes that the driver reports, gigabytes that the data sheet says, where the first comes from."""

    memory_bytes: int
    nominal_gb: int
    source: str = "nvidia-smi"


CARDS: Final = {
    "T4": Card(15360 * _MIB, 16),
    "L4": Card(23034 * _MIB, 24),
    "A10": Card(23028 * _MIB, 24),
    "A10G": Card(23028 * _MIB, 24),
    "RTX-3090": Card(24576 * _MIB, 24),
    "RTX-4090": Card(24564 * _MIB, 24),
    "RTX-5090": Card(32607 * _MIB, 32),
    "A40": Card(46068 * _MIB, 48),
    "L40S": Card(46068 * _MIB, 48),
    "RTX-A6000": Card(49140 * _MIB, 48),
    "RTX-6000-Ada": Card(49140 * _MIB, 48),
    "A100-40GB": Card(40960 * _MIB, 40),
    "A100-80GB": Card(81920 * _MIB, 80),
    "H100-80GB": Card(81559 * _MIB, 80),
    "H100-NVL": Card(95830 * _MIB, 94),
    "RTX-PRO-6000": Card(97887 * _MIB, 96),
    "H200": Card(143771 * _MIB, 141),
    "B200": Card(183359 * _MIB, 192),
    "MI300X": Card(206141652992, 192, "rocm-smi"),
}
