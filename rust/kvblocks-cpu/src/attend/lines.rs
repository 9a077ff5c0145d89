//! Scratch that starts at a cache line. Imports nothing.
//!
//! Invariant: a vector at a multiple of its own size lies in one line. Loads that touch two lines take twice as long,
//! and the products load more of their scratch than of K and V.

const LINE_BYTES: usize = 64;
const LINE_LEN: usize = LINE_BYTES / size_of::<f32>();

/// Memory that is kept between uses.
#[derive(Default)]
pub(super) struct Lines(Vec<f32>);

impl Lines {
    /// `len` elements of a value. O(len).
    pub(super) fn filled(&mut self, len: usize, value: f32) -> &mut [f32] {
        self.0.clear();
        self.0.resize(len + LINE_LEN - 1, value);
        // An offset that is not known is none: slower, and as right.
        let start = self.0.as_ptr().align_offset(LINE_BYTES);
        let start = if start < LINE_LEN { start } else { 0 };
        &mut self.0[start..][..len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_a_line_whatever_its_length() {
        let mut lines = Lines::default();
        for len in [0, 1, 17, 1000, 3, 100_000] {
            let filled = lines.filled(len, 1.0);
            assert_eq!(filled.len(), len);
            assert!(filled.iter().all(|&value| value == 1.0));
            assert_eq!(filled.as_ptr() as usize % LINE_BYTES, 0);
            filled.fill(2.0);
        }
    }
}
