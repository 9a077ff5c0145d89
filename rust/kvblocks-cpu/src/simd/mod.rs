//! Vectors of f32 lanes: the one trait that the kernels are written in, and the instruction sets that implement it.
//! Imports nothing of the crate.
//!
//! Invariant: a value of `Avx2` or `Avx512` exists only where the processor has been asked for all the features that
//! its methods use. Everything between a `vectorize` and an operation is `#[inline(always)]`, so that it is compiled
//! with these features; no closure takes or returns vectors (`array::map`, `from_fn`), as it may stay a function without
//! them, in which each operation is a call.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::fmt;

/// Work that is compiled once for each instruction set.
pub(crate) trait Task {
    type Output;

    /// Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Operations on `LANES` f32 at once; `I` are the same lanes as u32, `M` one truth value a lane.
pub(crate) trait Simd: Copy + Send + Sync {
    type F: Copy;
    type I: Copy;
    type M: Copy;
    /// What each code of a group stands for.
    type Table: Copy;
    const LANES: usize;
    /// Vectors of queries that a tile of prefill holds: with four keys each, their sums leave registers for operands.
    const VECTORS: usize;
    /// Whether there are operations on pairs of bf16.
    const BF16: bool;

    /// Run a task in a function of its own that has the features of this instruction set: not inlined, as loops that
    /// share a function share its registers as well. Compilers drop `inline(never)` where there are features.
    fn vectorize<T: Task>(self, task: T) -> T::Output;

    fn splat(self, value: f32) -> Self::F;
    /// 0, 1, 2, ..
    fn iota(self) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once or twice.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// b where one of the two is a NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// b where one of the two is a NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// a * 2^n for integers n in -252..=252, rounded once.
    fn scale(self, a: Self::F, n: Self::F) -> Self::F;
    fn less(self, a: Self::F, b: Self::F) -> Self::M;
    fn is_nan(self, a: Self::F) -> Self::M;
    /// Whether the mask holds anywhere.
    fn any(self, mask: Self::M) -> bool;
    /// a where the mask holds, else b.
    fn select(self, mask: Self::M, a: Self::F, b: Self::F) -> Self::F;

    fn bits(self, a: Self::F) -> Self::I;
    fn as_float(self, a: Self::I) -> Self::F;
    fn splat_bits(self, value: u32) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn add_bits(self, a: Self::I, b: Self::I) -> Self::I;
    fn shift_left<const N: u32>(self, a: Self::I) -> Self::I;
    fn shift_right<const N: u32>(self, a: Self::I) -> Self::I;
    fn select_bits(self, mask: Self::M, a: Self::I, b: Self::I) -> Self::I;
    /// The values of integers below 2^31 in magnitude, as two's complement.
    fn to_float(self, a: Self::I) -> Self::F;
    /// The integers nearest to values below 2^31 in magnitude, ties to even.
    fn to_int(self, a: Self::F) -> Self::I;

    /// The sum of all lanes.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane, unless one is a NaN.
    fn highest(self, a: Self::F) -> f32;
    /// The sums of four vectors.
    fn sum_4(self, a: [Self::F; 4]) -> [f32; 4];

    /// Safety of all loads and stores: `LANES` elements from the pointer on, which need not be aligned, are readable,
    /// or writable.
    unsafe fn load(self, from: *const f32) -> Self::F;
    unsafe fn store(self, to: *mut f32, a: Self::F);
    unsafe fn load_bits(self, from: *const u32) -> Self::I;
    unsafe fn load_u8(self, from: *const u8) -> Self::I;
    /// Sign-extended.
    unsafe fn load_i8(self, from: *const i8) -> Self::I;
    unsafe fn load_u16(self, from: *const u16) -> Self::I;
    /// The low bytes.
    unsafe fn store_u8(self, to: *mut u8, a: Self::I);
    /// The low halves.
    unsafe fn store_u16(self, to: *mut u16, a: Self::I);
    unsafe fn load_f16(self, from: *const u16) -> Self::F;
    /// Rounded to nearest even; a NaN stays a NaN.
    unsafe fn store_f16(self, to: *mut u16, a: Self::F);
    unsafe fn load_e4m3(self, from: *const u8) -> Self::F;
    unsafe fn load_e5m2(self, from: *const u8) -> Self::F;

    /// The value of the f16 of these bits.
    fn half(self, bits: u16) -> f32;
    /// `code * scale + zero` for the codes of `BITS` bits, 2 or 4; product and sum are rounded.
    fn table<const BITS: usize>(self, scale: f32, zero: f32) -> Self::Table;
    /// What codes stand for, of which the low `BITS` bits count.
    fn look_up<const BITS: usize>(self, table: Self::Table, codes: Self::I) -> Self::F;
    /// Codes packed from the lowest bits on: `LANES * BITS / 8` bytes. Only the low `BITS` bits of a lane count.
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8) -> Self::I;
    /// Pack codes below 2^BITS.
    unsafe fn store_codes<const BITS: usize>(self, to: *mut u8, codes: Self::I);

    /// Both halves of each lane as bf16, in f32: the low ones, the high ones.
    #[inline(always)]
    fn unpair(self, a: Self::I) -> [Self::F; 2] {
        [self.as_float(self.shift_left::<16>(a)), self.as_float(self.and(a, self.splat_bits(0xFFFF_0000)))]
    }

    /// Ask for the cache line of an address, valid or not, in the first-level cache.
    fn prefetch_near(self, address: *const u8);
    /// The same, in the second-level cache.
    fn prefetch_far(self, address: *const u8);

    // What follows is there where `BF16` is true; elsewhere nobody asks for it.

    /// The products of both halves of each lane as bf16, added to c.
    fn dot_pairs(self, a: Self::I, b: Self::I, c: Self::F) -> Self::F {
        let _ = (a, b);
        c
    }

    /// Interleave the bytes (8 bits) or halves of lanes (16) of two vectors, within each 16 bytes of them: what comes of
    /// the first 8 bytes, and of the others.
    fn interleave<const BITS: usize>(self, a: Self::I, b: Self::I) -> [Self::I; 2] {
        [a, b]
    }

    /// Look bytes up in two tables, at the low 7 bits of `places`; the sign bits of other bytes go into the second result,
    /// and both are interleaved: 4 * LANES elements of 16 bits.
    fn look_up_pairs(self, places: Self::I, signs: Self::I, tables: &[[u8; 128]; 2]) -> [Self::I; 2] {
        let _ = tables;
        [places, signs]
    }

    /// The smaller of each byte and its complement: i of bytes i below 128 and of -1 - i.
    fn fold_bytes(self, a: Self::I) -> Self::I {
        a
    }

    /// Store as bf16, rounded to nearest even, subnormal numbers as 0; what was stored comes back.
    ///
    /// # Safety
    /// `LANES` elements are writable.
    unsafe fn store_bf16(self, to: *mut u16, a: Self::F) -> Self::F {
        let _ = to;
        a
    }

    /// 8 * LANES packed codes, 32 to each fourth of the vector: of 4 bits, a byte has two neighbours; of 2 bits, byte i of a
    /// fourth has codes 4 i and 4 i + 1 in its low half for i below 8, and codes 4 i - 30 and 4 i - 29 for others.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_nibbles<const BITS: usize>(self, from: *const u8) -> Self::I {
        let _ = from;
        self.splat_bits(0)
    }

    /// Four elements, each in all lanes of a fourth.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn spread(self, from: *const f32) -> Self::F {
        let _ = from;
        self.splat(0.0)
    }

    /// Four elements from each of four places, a fourth each.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_fourths(self, from: [*const f32; 4]) -> Self::F {
        let _ = from;
        self.splat(0.0)
    }

    /// Two vectors as bf16, rounded to nearest even, subnormal numbers as 0: in the fourths of the result, pairs of the first
    /// and second fourth of a, of its third and last, and the same of b.
    fn pair_fourths(self, a: Self::F, b: Self::F) -> Self::I {
        let _ = b;
        self.bits(a)
    }

    /// The sum of the fourths; then each of its lanes in all lanes of a fourth.
    fn sum_fourths(self, a: Self::F) -> Self::F {
        a
    }
}

/// The widest `LANES` of all instruction sets.
pub(crate) const MAX_LANES: usize = 16;
/// Lanes of the narrowest.
pub(crate) const MIN_LANES: usize = 8;

/// An instruction set that this processor has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512::Avx512<true>),
}

impl Isa {
    /// Names of all instruction sets that there are kernels for, the widest first.
    pub const NAMES: [&'static str; 4] = ["avx512bf16", "avx512", "avx2", "portable"];

    /// The instruction set of that name; None where the processor does not have it, or the name is unknown.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "portable" => Some(Self(Kind::Portable(portable::Portable))),
            #[cfg(target_arch = "x86_64")]
            "avx2" => avx2::Avx2::detect().map(|simd| Self(Kind::Avx2(simd))),
            #[cfg(target_arch = "x86_64")]
            "avx512" => avx512::Avx512::detect().map(|simd| Self(Kind::Avx512(simd))),
            #[cfg(target_arch = "x86_64")]
            "avx512bf16" => avx512::Avx512::detect_bf16().map(|simd| Self(Kind::Avx512Bf16(simd))),
            _ => None,
        }
    }

    /// The widest instruction set that the processor has.
    pub fn best() -> Self {
        Self::NAMES
            .iter()
            .find_map(|name| Self::named(name))
            .unwrap_or(Self(Kind::Portable(portable::Portable)))
    }

    /// One of `NAMES`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => "avx512bf16",
        }
    }

    /// f32 lanes of a vector.
    pub(crate) fn lanes(self) -> usize {
        self.run(Lanes)
    }

    /// Queries of a unit whose lanes are queries.
    pub(crate) fn wide_rows(self) -> usize {
        self.run(WideRows)
    }

    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self.0 {
            Kind::Portable(simd) => simd.vectorize(task),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => simd.vectorize(task),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => simd.vectorize(task),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => simd.vectorize(task),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

struct Lanes;

impl Task for Lanes {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::LANES
    }
}

struct WideRows;

impl Task for WideRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::VECTORS * S::LANES
    }
}
