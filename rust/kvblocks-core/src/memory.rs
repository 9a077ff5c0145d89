//! Memory of the pool: asked for once, as zero pages, and touched only where it is used. Imports nothing.
//!
//! A pool of a million blocks reaches over 130 MB in an order that only traffic knows. In pages of 4 KB each block costs
//! several page walks, of some 50 ns in a virtual machine, so Linux is asked for pages of 2 MB. Nothing is resident that
//! would not be once the pool has been used: only whole pages within the memory are asked for.

use bytemuck::Zeroable;

/// Bytes of a large page.
const PAGE: usize = 1 << 21;

/// So many zeros; None if the memory cannot be had. O(1) for what does not come from the heap.
pub(crate) fn zeroed<T: Zeroable>(len: usize) -> Option<Vec<T>> {
    let memory = bytemuck::try_zeroed_vec(len).ok()?;
    ask_for_large_pages(&memory);
    Some(memory)
}

/// Ask for large pages, of Linux; where it has none, or is set to give none, nothing changes.
#[allow(unsafe_code)]
fn ask_for_large_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    {
        let start = memory.as_ptr().cast::<u8>();
        let (before, len) = (start.align_offset(PAGE), size_of_val(memory));
        let whole = len.saturating_sub(before) / PAGE * PAGE;
        if whole > 0 {
            // SAFETY: the range lies within the memory, and the advice changes neither what it holds nor who may use it.
            unsafe {
                libc::madvise(start.wrapping_add(before).cast_mut().cast(), whole, libc::MADV_HUGEPAGE)
            };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}
