//! Sixteen lanes of AVX-512 (F, BW, DQ, VL), and the same with BF16 and VBMI.

use std::arch::x86_64::*;

use super::{Simd, Task};

/// Witness that the processor has AVX-512 F, BW, DQ and VL; with `BF16`, also BF16 and VBMI.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512<const BF16: bool>(());

impl Avx512<false> {
    pub(super) fn detect() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        detected.then_some(Self(()))
    }
}

impl Avx512<true> {
    pub(super) fn detect_bf16() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi");
        Avx512::detect().filter(|_| detected).map(|_| Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_features<T: Task, const BF16: bool>(simd: Avx512<BF16>, task: T) -> T::Output {
    task.run(simd)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
fn with_all_features<T: Task, const BF16: bool>(simd: Avx512<BF16>, task: T) -> T::Output {
    task.run(simd)
}

/// Intrinsics on registers, in methods of `Avx512`.
macro_rules! on_registers {
    ($body:expr) => {{
        // SAFETY: the receiver is the witness that the processor has the features; no memory is touched.
        #[allow(unused_unsafe)]
        unsafe {
            $body
        }
    }};
}

/// Intrinsics on memory, in methods of `Avx512`.
macro_rules! on_memory {
    ($body:expr) => {{
        // SAFETY: the receiver is the witness that the processor has the features; the caller answers for the memory.
        unsafe { $body }
    }};
}

/// What bytes are in a table of their low 7 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn look_up_bytes(codes: __m512i, table: &[u8; 128]) -> __m512i {
    // SAFETY: the table has the bytes of two vectors.
    let [first, second] = unsafe {
        [_mm512_loadu_si512(table.as_ptr().cast()), _mm512_loadu_si512(table.as_ptr().add(64).cast())]
    };
    _mm512_permutex2var_epi8(first, codes, second)
}

/// Of the first fourth the first lane, of the second the second, and so on, in all lanes of the fourth.
#[target_feature(enable = "avx512f")]
#[inline]
fn spread_lanes(a: __m512) -> __m512 {
    _mm512_permutevar_ps(a, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))
}

impl<const BF16: bool> Simd for Avx512<BF16> {
    type F = __m512;
    type I = __m512i;
    type M = __mmask16;
    type Table = __m512;
    const LANES: usize = 16;
    const VECTORS: usize = 4;
    const BF16: bool = BF16;

    #[inline(never)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        on_registers!(if BF16 { with_all_features(self, task) } else { with_features(self, task) })
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        on_registers!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn iota(self) -> __m512 {
        on_registers!(_mm512_setr_ps(
            0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0
        ))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        on_registers!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        on_registers!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }

    #[inline(always)]
    fn scale(self, a: __m512, n: __m512) -> __m512 {
        on_registers!(_mm512_scalef_ps(a, n))
    }

    #[inline(always)]
    fn less(self, a: __m512, b: __m512) -> __mmask16 {
        on_registers!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    fn is_nan(self, a: __m512) -> __mmask16 {
        on_registers!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a))
    }

    #[inline(always)]
    fn any(self, mask: __mmask16) -> bool {
        mask != 0
    }

    #[inline(always)]
    fn select(self, mask: __mmask16, a: __m512, b: __m512) -> __m512 {
        on_registers!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn bits(self, a: __m512) -> __m512i {
        on_registers!(_mm512_castps_si512(a))
    }

    #[inline(always)]
    fn as_float(self, a: __m512i) -> __m512 {
        on_registers!(_mm512_castsi512_ps(a))
    }

    #[inline(always)]
    fn splat_bits(self, value: u32) -> __m512i {
        on_registers!(_mm512_set1_epi32(value as i32))
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        on_registers!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        on_registers!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn add_bits(self, a: __m512i, b: __m512i) -> __m512i {
        on_registers!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: __m512i) -> __m512i {
        on_registers!(_mm512_slli_epi32::<N>(a))
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: __m512i) -> __m512i {
        on_registers!(_mm512_srli_epi32::<N>(a))
    }

    #[inline(always)]
    fn select_bits(self, mask: __mmask16, a: __m512i, b: __m512i) -> __m512i {
        on_registers!(_mm512_mask_blend_epi32(mask, b, a))
    }

    #[inline(always)]
    fn to_float(self, a: __m512i) -> __m512 {
        on_registers!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn to_int(self, a: __m512) -> __m512i {
        on_registers!(_mm512_cvtps_epi32(a))
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        on_registers!(_mm512_reduce_add_ps(a))
    }

    #[inline(always)]
    fn highest(self, a: __m512) -> f32 {
        on_registers!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn sum_4(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        on_registers!({
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            // Each 128-bit lane: a, b, c, d summed over that lane.
            let abcd = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xEE>(ab, cd));
            let half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps::<1>(abcd));
            let sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            std::mem::transmute::<__m128, [f32; 4]>(sums)
        })
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        on_memory!(_mm512_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        on_memory!(_mm512_storeu_ps(to, a))
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u32) -> __m512i {
        on_memory!(_mm512_loadu_si512(from.cast()))
    }

    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> __m512i {
        on_memory!(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512i {
        on_memory!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn load_u16(self, from: *const u16) -> __m512i {
        on_memory!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8, a: __m512i) {
        on_memory!(_mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(a)))
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, a: __m512i) {
        on_memory!(_mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(a)))
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        on_memory!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, a: __m512) {
        on_memory!(_mm256_storeu_si256(
            to.cast(),
            _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
        ))
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> __m512 {
        on_memory!({
            // As the f16 that is 2^8 times smaller: the exponent's bias is 15 there and 7 here.
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast())));
            let half = _mm256_and_si256(wide, _mm256_set1_epi16(0xBF80_u16 as i16));
            let magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3F80));
            let nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x3F80));
            let half = _mm256_mask_blend_epi16(nan, half, _mm256_set1_epi16(0x7E00));
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        })
    }

    #[inline(always)]
    unsafe fn load_e5m2(self, from: *const u8) -> __m512 {
        on_memory!({
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(wide))
        })
    }

    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        on_registers!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))))
    }

    #[inline(always)]
    fn table<const BITS: usize>(self, scale: f32, zero: f32) -> __m512 {
        on_registers!({
            let codes = if BITS == 2 {
                _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0)
            } else {
                self.iota()
            };
            _mm512_add_ps(_mm512_mul_ps(codes, _mm512_set1_ps(scale)), _mm512_set1_ps(zero))
        })
    }

    #[inline(always)]
    fn look_up<const BITS: usize>(self, table: __m512, codes: __m512i) -> __m512 {
        // Four bits of an index count; a table of two bits repeats itself.
        on_registers!(_mm512_permutexvar_ps(codes, table))
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8) -> __m512i {
        on_memory!(if BITS == 2 {
            let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            _mm512_srlv_epi32(_mm512_set1_epi32(from.cast::<i32>().read_unaligned()), shifts)
        } else if BF16 {
            // Of each copy of the 64 bits, the two codes that its lanes want.
            let shifts = _mm512_setr_epi64(
                0x04_0000_0000,
                0x0C_0000_0008,
                0x14_0000_0010,
                0x1C_0000_0018,
                0x24_0000_0020,
                0x2C_0000_0028,
                0x34_0000_0030,
                0x3C_0000_0038,
            );
            _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(from.cast::<i64>().read_unaligned()))
        } else {
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let codes = _mm512_set1_epi64(from.cast::<i64>().read_unaligned());
            _mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, codes), shifts)
        })
    }

    #[inline(always)]
    unsafe fn store_codes<const BITS: usize>(self, to: *mut u8, codes: __m512i) {
        on_memory!({
            let bytes = _mm512_cvtepi32_epi8(codes);
            if BITS == 2 {
                // c0 + 4 c1, then that + 16 (c2 + 4 c3)
                let pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0401));
                let fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x0010_0001));
                _mm_storeu_si32(to, _mm_cvtepi32_epi8(fours));
            } else {
                let pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
                _mm_storel_epi64(to.cast(), _mm_cvtepi16_epi8(pairs));
            }
        })
    }

    #[inline(always)]
    fn dot_pairs(self, a: __m512i, b: __m512i, c: __m512) -> __m512 {
        on_registers!(if BF16 {
            _mm512_dpbf16_ps(
                c,
                std::mem::transmute::<__m512i, __m512bh>(a),
                std::mem::transmute::<__m512i, __m512bh>(b),
            )
        } else {
            c
        })
    }

    #[inline(always)]
    fn interleave<const BITS: usize>(self, a: __m512i, b: __m512i) -> [__m512i; 2] {
        on_registers!(if BITS == 8 {
            [_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)]
        } else {
            [_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)]
        })
    }

    #[inline(always)]
    fn look_up_pairs(self, places: __m512i, signs: __m512i, tables: &[[u8; 128]; 2]) -> [__m512i; 2] {
        on_registers!(if BF16 {
            let [low, high] = [look_up_bytes(places, &tables[0]), look_up_bytes(places, &tables[1])];
            // high | (signs & 0x80)
            let high = _mm512_ternarylogic_epi64::<0xF8>(high, signs, _mm512_set1_epi8(-128));
            self.interleave::<8>(low, high)
        } else {
            [places; 2]
        })
    }

    #[inline(always)]
    fn fold_bytes(self, a: __m512i) -> __m512i {
        on_registers!(_mm512_min_epu8(a, _mm512_xor_si512(a, _mm512_set1_epi8(-1))))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, a: __m512) -> __m512 {
        on_memory!(if BF16 {
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(a));
            _mm256_storeu_si256(to.cast(), rounded);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded)))
        } else {
            a
        })
    }

    #[inline(always)]
    unsafe fn load_nibbles<const BITS: usize>(self, from: *const u8) -> __m512i {
        on_memory!(if BITS == 2 {
            let eights = _mm512_castsi256_si512(_mm256_loadu_si256(from.cast()));
            let twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), eights);
            _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4))
        } else {
            _mm512_loadu_si512(from.cast())
        })
    }

    #[inline(always)]
    unsafe fn spread(self, from: *const f32) -> __m512 {
        on_memory!(spread_lanes(_mm512_broadcast_f32x4(_mm_loadu_ps(from))))
    }

    #[inline(always)]
    unsafe fn load_fourths(self, [a, b, c, d]: [*const f32; 4]) -> __m512 {
        on_memory!({
            let ab = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(_mm_loadu_ps(a)), _mm_loadu_ps(b));
            _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(ab, _mm_loadu_ps(c)), _mm_loadu_ps(d))
        })
    }

    #[inline(always)]
    fn pair_fourths(self, a: __m512, b: __m512) -> __m512i {
        on_registers!(if BF16 {
            let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a));
            let pairs = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
            _mm512_shuffle_epi8(rounded, _mm512_broadcast_i32x4(pairs))
        } else {
            _mm512_castps_si512(a)
        })
    }

    #[inline(always)]
    fn sum_fourths(self, a: __m512) -> __m512 {
        on_registers!({
            let halves = _mm512_add_ps(a, _mm512_shuffle_f32x4::<0x4E>(a, a));
            spread_lanes(_mm512_add_ps(halves, _mm512_shuffle_f32x4::<0xB1>(halves, halves)))
        })
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        on_registers!(_mm_prefetch::<_MM_HINT_T0>(address.cast()))
    }

    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        on_registers!(_mm_prefetch::<_MM_HINT_T1>(address.cast()))
    }
}
