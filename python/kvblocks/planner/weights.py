"""How large a model's weights are: as stated, from the files that hold them, or from the number of parameters.

Owns `Weights` and the reading of safetensors indexes and headers. Sizes are bytes of the whole model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from kvblocks.config import as_integer, parse_memory
from kvblocks.planner.fields import read_json
from kvblocks.planner.model import DTYPE_BYTES, Model
from kvblocks.planner.parameters import count_parameters
from kvblocks.report import UserError

INDEX: Final = "model.safetensors.index.json"
# The format's own limit, in bytes.
_LARGEST_HEADER: Final = 100_000_000
# Bytes of a parameter; four bits without the scales, which differ from one scheme to the next.
PARAMETER_BYTES: Final[Mapping[str, Fraction]] = {
    **{name: Fraction(size) for name, size in DTYPE_BYTES.items()},
    "int4": Fraction(1, 2),
}


@dataclass(frozen=True)
class Weights:
    """Bytes of all weights, and how they were found out."""

    num_bytes: int
    source: str

    def per_gpu(self, num_ranks: int) -> int:
        """Bytes on each tensor-parallel rank, an even share rounded up."""
        return -(-self.num_bytes // num_ranks)


def from_option(text: str) -> Weights:
    """Weights of a size such as "14GB", or of a safetensors index, file, or folder of those."""
    path = Path(text)
    if path.exists():
        found = from_files(path)
        if found is None:
            raise UserError(f"--weights {text}: expected a folder with {INDEX} or *.safetensors files")
        return found
    try:
        return Weights(parse_memory(text), "as given")
    except ValueError as error:
        raise UserError(f"--weights {text}: no such file, and not a size: {error}") from error


def from_files(path: Path) -> Weights | None:
    """Weights in a folder, an index or a safetensors file; None for a folder that has none."""
    if path.is_dir():
        if (path / INDEX).exists():
            return _from_index(path / INDEX)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            return None
        return Weights(
            sum(_tensor_bytes(file) for file in files), f"{len(files)} safetensors files in {path}"
        )
    if path.suffix == ".json":
        return _from_index(path)
    return Weights(_tensor_bytes(path), str(path))


def from_parameters(num_parameters: int, dtype: str, source: str) -> Weights:
    """Weights of a number of parameters in one dtype."""
    size = PARAMETER_BYTES[dtype]
    return Weights(
        -int(-num_parameters * size // 1),
        f"{num_parameters:,} parameters {source} x {float(size):g} B ({dtype})",
    )


def from_model(model: Model, dtype: str | None) -> Weights:
    """Weights counted from a configuration; a UserError where that cannot be done or would be wrong."""
    quantised = model.fields.get("quantization_config")
    if quantised is not None and dtype is None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UserError(
            f"{model.name}: its weights are quantised ({method}): --weights SIZE, a folder with the weights, "
            f"or --weights-dtype says how large they are"
        )
    number = count_parameters(model, model.name)
    if number is None:
        raise UserError(
            f"{model.name}: no rule counts the parameters of model_type {model.model_type!r}: "
            f"--weights SIZE or --params N says how large the weights are"
        )
    return from_parameters(number, dtype or model.dtype, "counted from the configuration")


def _from_index(path: Path) -> Weights:
    value = read_json(path)
    metadata = value.get("metadata") if isinstance(value, dict) else None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers give a whole number as a float.
    number = int(size) if isinstance(size, float) and size.is_integer() else as_integer(size)
    if number is None or not 1 <= number <= 1 << 60:
        raise UserError(f"{path}: metadata.total_size is {size!r}: expected bytes, an integer from 1 to 2^60")
    return Weights(number, f"metadata.total_size of {path}")


def _tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a safetensors file: the largest end offset in its header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            total = path.stat().st_size
            if not 2 <= length <= min(total - 8, _LARGEST_HEADER):
                raise UserError(
                    f"{path}: header of {length} bytes in a file of {total}: expected safetensors"
                )
            header: Any = json.loads(file.read(length))
            ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path}: expected a safetensors header with data_offsets of each tensor") from error
    end = max((as_integer(end) or 0 for end in ends), default=0)
    if end != total - 8 - length:
        raise UserError(f"{path}: tensors end at byte {end}, the file has {total - 8 - length}: truncated?")
    return end
