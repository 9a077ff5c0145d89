"""Instructions that compute: arithmetic, comparisons, conversions.

Written from the PTX ISA alone and with other means than the host's twins: NumPy's and ml_dtypes' conversions, float64
where a product is to be exact. Approximate instructions are computed exactly and rounded once. Imports block.py.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from kernels.ptx.block import TYPES, Block, read, write
from kernels.ptx.program import Instruction, PtxError

NAN32 = np.uint32(0x7FFFFFFF)
NAN16 = np.uint16(0x7FFF)


def canonical(value: np.ndarray) -> np.ndarray:
    """Floating-point results with the one NaN that instructions give."""
    if value.dtype == np.float32:
        return np.where(np.isnan(value), NAN32, value.view(np.uint32)).view(np.float32)
    return value


# --- Arithmetic.


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The sum a * b + c of float32, rounded once: the product fits float64, and the sum is rounded to odd there."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    bits = total.view(np.int64)
    # Where something was rounded off and the last bit is even, the odd neighbour towards it.
    away = (error > 0) == (total > 0)
    odd = np.where(away, bits | 1, bits - 1)
    needs = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    return np.where(needs, odd, bits).view(np.float64).astype(np.float32)


def extreme(a: np.ndarray, b: np.ndarray, *, highest: bool) -> np.ndarray:
    """The larger or smaller float32: a NaN counts only if both are, and +0 is larger than -0."""
    result = np.asarray((np.fmax if highest else np.fmin)(a, b))
    bits = (a.view(np.uint32) & b.view(np.uint32)) if highest else (a.view(np.uint32) | b.view(np.uint32))
    return np.where((a == 0) & (b == 0), bits, result.view(np.uint32)).view(np.float32)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero for integers."""
    if a.dtype.kind == "f":
        return a / b
    if a.dtype.kind == "u":
        return np.where(
            b == 0, a.dtype.type(0) - a.dtype.type(1), a // np.where(b == 0, 1, b).astype(a.dtype)
        )
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = a // safe
    return quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)


def shift(a: np.ndarray, amount: np.ndarray, *, left: bool) -> np.ndarray:
    """Amounts beyond the width leave nothing, or the sign."""
    bits = a.dtype.itemsize * 8
    within = np.minimum(amount, bits - 1).astype(a.dtype)
    result = a << within if left else a >> within
    if not left and a.dtype.kind == "i":
        return result
    return np.where(amount >= bits, a.dtype.type(0), result)


def halves(function: Callable[..., np.ndarray], *words: np.ndarray) -> np.ndarray:
    """A function of float16, in both halves of words."""
    results = []
    for bits in (0, 16):
        parts = [(word >> np.uint32(bits)).astype(np.uint16).view(np.float16) for word in words]
        results.append(half_bits(function(*(part.astype(np.float32) for part in parts))).astype(np.uint32))
    return results[0] | results[1] << np.uint32(16)


def half_bits(value: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(value), NAN16, value.astype(np.float16).view(np.uint16))


def bfloat_bits(value: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(value), NAN16, value.astype(ml_dtypes.bfloat16).view(np.uint16))


def float8_bits(value: np.ndarray, dtype: type, largest: float) -> np.ndarray:
    """Saturated to the largest finite value."""
    codes = np.clip(value, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(0x7F), codes)


def flushed(value: np.ndarray) -> np.ndarray:
    """Denormal numbers as zero of the same sign."""
    return np.where(np.abs(value) < np.float32(2**-126), np.copysign(np.float32(0), value), value)


_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "div": divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "copysign": lambda a, b: np.copysign(b, a),
    "rem": lambda a, b: a - divide(a, b) * b,
}
_UNARY = {
    "abs": np.abs,
    "neg": np.negative,
    "not": np.invert,
    "sqrt": np.sqrt,
    "ex2": lambda x: flushed(np.exp2(flushed(x).astype(np.float64)).astype(np.float32)),
    "lg2": lambda x: np.log2(flushed(x).astype(np.float64)).astype(np.float32),
    "rcp": lambda x: flushed((1 / flushed(x).astype(np.float64)).astype(np.float32)),
    "mov": lambda x: x,
}


def _binary(block: Block, instruction: Instruction) -> None:
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    target, *sources = instruction.operands
    a, b = (read(block, each, kind) for each in sources)
    if kind == "f16x2":
        write(block, target, halves(_BINARY[name], a, b))
    else:
        result = np.asarray(_BINARY[name](a, b))
        write(block, target, result if name in ("and", "or", "xor") else canonical(result))


def _unary(block: Block, instruction: Instruction) -> None:
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    result = np.asarray(_UNARY[name](read(block, instruction.operands[1], kind)))
    write(
        block, instruction.operands[0], canonical(result) if name in ("ex2", "lg2", "rcp", "sqrt") else result
    )


def _minmax(block: Block, instruction: Instruction) -> None:
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    a, b = (read(block, each, kind) for each in instruction.operands[1:])
    if kind == "f32":
        write(block, instruction.operands[0], canonical(extreme(a, b, highest=name == "max")))
    else:
        write(block, instruction.operands[0], np.maximum(a, b) if name == "max" else np.minimum(a, b))


def _multiply(block: Block, instruction: Instruction) -> None:
    name, kind = instruction.opcode[0], instruction.opcode[-1]
    target, *sources = instruction.operands
    a, b = (read(block, each, kind) for each in sources[:2])
    if kind == "f16x2":
        write(block, target, halves(np.multiply, a, b))
        return
    if "wide" in instruction.opcode:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        a, b = a.astype(wide), b.astype(wide)
        kind = f"{kind[0]}{8 * wide.itemsize}"
    elif "hi" in instruction.opcode:
        product = a.astype(object) * b.astype(object) // 2 ** (8 * a.dtype.itemsize)
        result = np.asarray(product).astype(a.dtype)
        write(block, target, result if name == "mul" else result + read(block, sources[2], kind))
        return
    result = np.asarray(a * b)
    write(block, target, canonical(result if name == "mul" else result + read(block, sources[2], kind)))


def _fma(block: Block, instruction: Instruction) -> None:
    a, b, c = (read(block, each, "f32") for each in instruction.operands[1:])
    if instruction.opcode != ("fma", "rn", "f32"):
        raise PtxError("unknown instruction")
    write(block, instruction.operands[0], canonical(fused(a, b, c)))


def _shift(block: Block, instruction: Instruction) -> None:
    target, a, b = instruction.operands
    value, amount = read(block, a, instruction.opcode[-1]), read(block, b, "u32")
    write(block, target, shift(value, amount, left=instruction.opcode[0] == "shl"))


_COMPARE = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),  # of floating-point numbers: false for a NaN
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _setp(block: Block, instruction: Instruction) -> None:
    relation, kind = instruction.opcode[1], instruction.opcode[-1]
    if len(instruction.opcode) != 3 or len(instruction.operands) != 3:
        raise PtxError("unknown instruction")
    target, *sources = instruction.operands
    a, b = (read(block, each, kind) for each in sources)
    if relation in ("num", "nan"):
        result = (np.isnan(a) | np.isnan(b)) ^ (relation == "num")
    elif relation in _COMPARE:
        result = _COMPARE[relation](a, b)
    else:  # "ltu": true for a NaN
        result = _COMPARE[relation.removesuffix("u")](a, b) | np.isnan(a) | np.isnan(b)
    write(block, target, np.asarray(result))


def _selp(block: Block, instruction: Instruction) -> None:
    target, a, b, chosen = instruction.operands
    kind = instruction.opcode[-1]
    write(block, target, np.where(read(block, chosen, "pred"), read(block, a, kind), read(block, b, kind)))


def _popc(block: Block, instruction: Instruction) -> None:
    value = read(block, instruction.operands[1], instruction.opcode[-1])
    bits = np.unpackbits(
        np.ascontiguousarray(np.atleast_1d(value)).view(np.uint8).reshape(-1, value.itemsize), axis=1
    )
    write(block, instruction.operands[0], bits.sum(1).astype(np.uint32))


def _bfi(block: Block, instruction: Instruction) -> None:
    kind = instruction.opcode[-1]
    source, into = (read(block, each, kind) for each in instruction.operands[1:3])
    first, length = (int(each) for each in instruction.operands[3:])
    mask = into.dtype.type(((1 << length) - 1) << first)
    write(block, instruction.operands[0], (into & ~mask) | (source << into.dtype.type(first) & mask))


def _prmt(block: Block, instruction: Instruction) -> None:
    if instruction.opcode != ("prmt", "b32"):
        raise PtxError("unknown instruction")
    a, b, selector = (read(block, each, "u32") for each in instruction.operands[1:])
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros((), np.uint32)
    for index in range(4):
        nibble = selector >> np.uint32(4 * index) & np.uint32(15)
        byte = (both >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint8)
        sign = np.where(byte >= 128, 255, 0).astype(np.uint8)
        result = result | np.where(nibble >= 8, sign, byte).astype(np.uint32) << np.uint32(8 * index)
    write(block, instruction.operands[0], result)


# --- Conversions.


def _convert(block: Block, instruction: Instruction) -> None:
    to, of = instruction.opcode[-2:]
    target, *sources = instruction.operands
    write(block, target, _converted(block, instruction.opcode[1:-2], to, of, sources))


def _converted(block: Block, modifiers: tuple[str, ...], to: str, of: str, sources: list[str]) -> np.ndarray:
    values = [read(block, each, of) for each in sources]
    value = values[0]
    match modifiers, to, of:
        case (), "f32", "f16":
            return canonical(value.view(np.float16).astype(np.float32))
        case (), "f32", "bf16":
            return canonical((value.astype(np.uint32) << np.uint32(16)).view(np.float32))
        case ("rn",), "f16", "f32":
            return half_bits(value)
        case ("rn",), "bf16", "f32":
            return bfloat_bits(value)
        case ("rn",), ("f16x2" | "bf16x2"), "f32":
            # The first source becomes the upper half.
            high, low = ((half_bits if to == "f16x2" else bfloat_bits)(each) for each in values)
            return high.astype(np.uint32) << np.uint32(16) | low
        case ("rn", "satfinite"), ("e4m3x2" | "e5m2x2"), "f32":
            e4m3 = (ml_dtypes.float8_e4m3fn, 448.0)
            codes = e4m3 if to == "e4m3x2" else (ml_dtypes.float8_e5m2, 57344.0)
            high, low = (float8_bits(each, *codes) for each in values)
            return high.astype(np.uint16) << np.uint16(8) | low
        case ("rn",), "f16x2", ("e4m3x2" | "e5m2x2"):
            dtype = ml_dtypes.float8_e4m3fn if of == "e4m3x2" else ml_dtypes.float8_e5m2
            low, high = (
                half_bits((value >> np.uint16(bits)).astype(np.uint8).view(dtype).astype(np.float32))
                for bits in (0, 8)
            )
            return high.astype(np.uint32) << np.uint32(16) | low
        case ("rni",), "s32", "f32":
            exact = np.rint(value.astype(np.float64))
            return np.where(np.isnan(exact), 0, np.clip(exact, -(2.0**31), 2.0**31 - 1)).astype(np.int32)
        case ("rn",), "f32", _ if of[0] in "su":
            return value.astype(np.float32)
        case (), _, _ if to[0] in "su" and of[0] in "su":
            return value.astype(TYPES[to])
    raise PtxError("unknown conversion")


INSTRUCTIONS: dict[str, Callable[[Block, Instruction], None]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(("min", "max"), _minmax),
    **dict.fromkeys(("mul", "mad"), _multiply),
    "fma": _fma,
    **dict.fromkeys(("shl", "shr"), _shift),
    "setp": _setp,
    "selp": _selp,
    "popc": _popc,
    "bfi": _bfi,
    "prmt": _prmt,
    "cvt": _convert,
}
