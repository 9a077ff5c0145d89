"""The records of kernels/params.py against the C++ structs: the compiler compares names, offsets and sizes."""

import re
from pathlib import Path

import numpy as np
import pytest

from kernels.emulator import CUDA, build
from kvblocks.kernels import params

pytestmark = pytest.mark.cuda

STRUCTS = {
    "write_kv.cu": {"WritePart": params.WRITE_PART, "WriteParams": params.WRITE},
    "gather_kv.cu": {"GatherPart": params.GATHER_PART, "GatherParams": params.GATHER},
    "copy_blocks.cu": {"Region": params.REGION, "CopyParams": params.COPY},
    "move_slots.cu": {"MoveParams": params.MOVE},
    "upload_step.cu": {"UploadRun": params.UPLOAD_RUN, "UploadParams": params.UPLOAD},
    "quantize.cu": {"QuantizeParams": params.QUANTIZE},
    "dequantize.cu": {"DequantizeParams": params.DEQUANTIZE},
    "merge_states.cu": {"AttentionState": params.STATE, "MergeParams": params.MERGE},
    "paged_attention_simt.cu": {
        "Paged": params.PAGED,
        "AttendParams": params.ATTEND,
        "SimtParams": params.SIMT,
    },
}
DEFINES = (("KVB_KV", "E4M3"), ("KVB_VECTORS", "1"))


def asserts(struct: str, record: np.dtype) -> list[str]:
    assert record.names is not None
    assert record.fields is not None
    lines = [f"static_assert(sizeof({struct}) == {record.itemsize});"]
    for name in record.names:
        field, offset = record.fields[name][:2]
        lines.append(f'static_assert(offsetof({struct}, {name}) == {offset}, "{name}");')
        lines.append(f'static_assert(sizeof({struct}::{name}) == {field.itemsize}, "{name}");')
    return lines


@pytest.mark.parametrize("file", STRUCTS)
def test_records_are_the_structs(file: str, tmp_path: Path) -> None:
    lines = ["#include <cstddef>", f'#include "{CUDA / file}"', "using namespace kvb;"]
    for struct, record in STRUCTS[file].items():
        lines += asserts(struct, record)
    source = tmp_path / f"params_{file}.cpp"
    source.write_text("\n".join(lines))
    build(source, CUDA, DEFINES)


def test_every_struct_that_the_host_packs_is_compared() -> None:
    said = set()
    for path in [*CUDA.rglob("*.cu"), *CUDA.rglob("*.cuh")]:
        said |= set(re.findall(r'static_assert\(sizeof\((\w+)\) == \d+, "the host packs', path.read_text()))
    assert len(said) >= 14
    assert said == {struct for structs in STRUCTS.values() for struct in structs}


def test_a_wrong_offset_would_be_found(tmp_path: Path) -> None:
    wrong = np.dtype([("block_stride", np.int64), ("head_stride", np.int64), ("token_stride", np.int64)])
    source = tmp_path / "wrong.cpp"
    lines = [
        "#include <cstddef>",
        '#include "kvblocks/paged.cuh"',
        "using namespace kvb;",
        *asserts("Paged", wrong),
    ]
    source.write_text("\n".join(lines))
    with pytest.raises(AssertionError, match="static assertion failed: head_stride"):
        build(source, CUDA)
