//! Asking for memory before it is needed. Imports nothing. The one place of the crate that is `unsafe`.
//!
//! Look-ups and evictions of a large pool wait for memory, one block after the other, although the next blocks are known:
//! asking for them a few blocks ahead lets the waits overlap.

/// Blocks to look ahead when memory is asked for: a wait of about 100 ns at 10 to 20 ns a block.
pub(crate) const AHEAD: usize = 8;

/// Ask for the cache line of `slice[at]`; where `at` is outside, for nothing that matters. Does nothing on other
/// architectures.
#[inline(always)]
#[allow(unsafe_code)]
pub(crate) fn prefetch<T>(slice: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it neither faults, whatever the address, nor reads as far as the program can tell.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            slice.as_ptr().wrapping_add(at).cast(),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, at);
}
