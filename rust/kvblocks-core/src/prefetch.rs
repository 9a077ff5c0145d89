//! Asking for memory before it is needed. Imports nothing. `unsafe` stands here and in `memory` only.
//!
//! Look-ups and evictions of a large pool wait for memory, one block after the other, although the next blocks are known:
//! asking for them a few blocks ahead lets the waits overlap.

/// Blocks to look ahead when memory is asked for: a wait of about 100 ns at 10 to 20 ns a block.
pub(crate) const AHEAD: usize = 8;

/// Ask for the cache line in which `slice[at]` begins, as `prefetch_part`.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T], at: usize) {
    prefetch_part(slice, at, 0);
}

/// Ask for the cache line of the `byte`th byte of `slice[at]`; where `at` is outside, for nothing that matters. Does nothing on other
/// architectures.
#[inline(always)]
#[allow(unsafe_code)]
pub(crate) fn prefetch_part<T>(slice: &[T], at: usize, byte: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it neither faults, whatever the address, nor reads as far as the program can tell.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            slice.as_ptr().wrapping_add(at).cast::<i8>().wrapping_add(byte),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, at, byte);
}
