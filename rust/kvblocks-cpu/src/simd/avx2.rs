//! Eight lanes of AVX2, with FMA and F16C.

use std::arch::x86_64::*;

use super::{Simd, Task};

/// Witness that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        detected.then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn with_features<T: Task>(simd: Avx2, task: T) -> T::Output {
    task.run(simd)
}

/// Intrinsics on registers, in methods of `Avx2`.
macro_rules! on_registers {
    ($body:expr) => {{
        // SAFETY: the receiver is the witness that the processor has the features; no memory is touched.
        #[allow(unused_unsafe)]
        unsafe {
            $body
        }
    }};
}

/// Intrinsics on memory, in methods of `Avx2`.
macro_rules! on_memory {
    ($body:expr) => {{
        // SAFETY: the receiver is the witness that the processor has the features; the caller answers for the memory.
        unsafe { $body }
    }};
}

impl Simd for Avx2 {
    type F = __m256;
    type I = __m256i;
    type M = __m256;
    /// Of two bits: what each code stands for. Of four: scale and zero.
    type Table = [__m256; 2];
    const LANES: usize = 8;
    const VECTORS: usize = 2;
    const BF16: bool = false;

    #[inline(never)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        on_registers!(with_features(self, task))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        on_registers!(_mm256_set1_ps(value))
    }

    #[inline(always)]
    fn iota(self) -> __m256 {
        on_registers!(_mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        on_registers!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        on_registers!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }

    #[inline(always)]
    fn scale(self, a: __m256, n: __m256) -> __m256 {
        on_registers!({
            // In two factors, as 2^n alone may be subnormal where the product is rounded only once.
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias));
            _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))
        })
    }

    #[inline(always)]
    fn less(self, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    fn is_nan(self, a: __m256) -> __m256 {
        on_registers!(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a))
    }

    #[inline(always)]
    fn any(self, mask: __m256) -> bool {
        on_registers!(_mm256_movemask_ps(mask) != 0)
    }

    #[inline(always)]
    fn select(self, mask: __m256, a: __m256, b: __m256) -> __m256 {
        on_registers!(_mm256_blendv_ps(b, a, mask))
    }

    #[inline(always)]
    fn bits(self, a: __m256) -> __m256i {
        on_registers!(_mm256_castps_si256(a))
    }

    #[inline(always)]
    fn as_float(self, a: __m256i) -> __m256 {
        on_registers!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    fn splat_bits(self, value: u32) -> __m256i {
        on_registers!(_mm256_set1_epi32(value as i32))
    }

    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        on_registers!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        on_registers!(_mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn add_bits(self, a: __m256i, b: __m256i) -> __m256i {
        on_registers!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: __m256i) -> __m256i {
        on_registers!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: __m256i) -> __m256i {
        on_registers!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }

    #[inline(always)]
    fn select_bits(self, mask: __m256, a: __m256i, b: __m256i) -> __m256i {
        on_registers!(_mm256_blendv_epi8(b, a, _mm256_castps_si256(mask)))
    }

    #[inline(always)]
    fn to_float(self, a: __m256i) -> __m256 {
        on_registers!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn to_int(self, a: __m256) -> __m256i {
        on_registers!(_mm256_cvtps_epi32(a))
    }

    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        on_registers!({
            let half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        })
    }

    #[inline(always)]
    fn highest(self, a: __m256) -> f32 {
        on_registers!({
            let half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        })
    }

    #[inline(always)]
    fn sum_4(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        on_registers!({
            let ab = _mm256_hadd_ps(a, b);
            let cd = _mm256_hadd_ps(c, d);
            // Each 128-bit lane: a, b, c, d summed over that lane.
            let abcd = _mm256_hadd_ps(ab, cd);
            let sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
            std::mem::transmute::<__m128, [f32; 4]>(sums)
        })
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        on_memory!(_mm256_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m256) {
        on_memory!(_mm256_storeu_ps(to, a))
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u32) -> __m256i {
        on_memory!(_mm256_loadu_si256(from.cast()))
    }

    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> __m256i {
        on_memory!(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())))
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m256i {
        on_memory!(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))
    }

    #[inline(always)]
    unsafe fn load_u16(self, from: *const u16) -> __m256i {
        on_memory!(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8, a: __m256i) {
        on_memory!({
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xFF));
            let words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm_storel_epi64(to.cast(), _mm_packus_epi16(words, words))
        })
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, a: __m256i) {
        on_memory!({
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xFFFF));
            let words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm_storeu_si128(to.cast(), words)
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m256 {
        on_memory!(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, a: __m256) {
        on_memory!(_mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)))
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> __m256 {
        on_memory!({
            // As the f16 that is 2^8 times smaller: the exponent's bias is 15 there and 7 here.
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast())));
            let half = _mm_and_si128(wide, _mm_set1_epi16(0xBF80_u16 as i16));
            let magnitude = _mm_and_si128(half, _mm_set1_epi16(0x3F80));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3F80));
            let half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7E00)));
            _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
        })
    }

    #[inline(always)]
    unsafe fn load_e5m2(self, from: *const u8) -> __m256 {
        on_memory!({
            let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast()));
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(wide))
        })
    }

    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        on_registers!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))))
    }

    #[inline(always)]
    fn table<const BITS: usize>(self, scale: f32, zero: f32) -> [__m256; 2] {
        on_registers!({
            let (scale, zero) = (_mm256_set1_ps(scale), _mm256_set1_ps(zero));
            if BITS == 2 {
                let codes = _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0);
                [_mm256_add_ps(_mm256_mul_ps(codes, scale), zero), zero]
            } else {
                [scale, zero]
            }
        })
    }

    #[inline(always)]
    fn look_up<const BITS: usize>(self, table: [__m256; 2], codes: __m256i) -> __m256 {
        on_registers!(if BITS == 2 {
            // Three bits of an index count; the table repeats itself.
            _mm256_permutevar8x32_ps(table[0], codes)
        } else {
            let codes = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
            _mm256_add_ps(_mm256_mul_ps(codes, table[0]), table[1])
        })
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8) -> __m256i {
        on_memory!(if BITS == 2 {
            let codes = _mm256_set1_epi16(from.cast::<i16>().read_unaligned());
            _mm256_srlv_epi32(codes, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14))
        } else {
            let codes = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
            _mm256_srlv_epi32(codes, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28))
        })
    }

    #[inline(always)]
    unsafe fn store_codes<const BITS: usize>(self, to: *mut u8, codes: __m256i) {
        on_memory!({
            let words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes));
            let bytes = _mm_packus_epi16(words, words);
            if BITS == 2 {
                // c0 + 4 c1, then that + 16 (c2 + 4 c3)
                let pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0401));
                let fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x0010_0001));
                let words = _mm_packus_epi32(fours, fours);
                _mm_storeu_si16(to, _mm_packus_epi16(words, words));
            } else {
                let pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
                _mm_storeu_si32(to, _mm_packus_epi16(pairs, pairs));
            }
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
