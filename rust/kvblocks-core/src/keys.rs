//! Extra keys: what beside token ids decides whether two requests may share K/V. Imports `error`.
//!
//! Adapter and salt hold for a whole request: together they are its *namespace*. A media item (an image, an audio clip)
//! holds for the blocks that its span of placeholder tokens overlaps.
//! Encoding of a key: kind (1 byte: 1 adapter, 2 salt, 3 media, 4 media that a truncation has cut short), type of the
//! value (1 byte: 1 text, 2 bytes, 3 integer, 4 boolean), length of the value (4 bytes little-endian), the value (text as
//! UTF-8, integers as 8 bytes little-endian); a media key is followed by the block's offset from the item's start (8 bytes
//! little-endian, signed), the number of the item's tokens (8 bytes little-endian) and, if it was cut, how many of them are
//! left (the same).
//! Invariant: keys are typed, framed and in canonical order, so two different sets of keys never encode alike.

use std::sync::Arc;

use crate::error::{Error, Result};

/// The value of a key. Values of different types are different, whatever they look like.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyValue {
    /// Text.
    Text(String),
    /// Bytes, such as a content digest at its full width.
    Bytes(Vec<u8>),
    /// An integer.
    Int(i64),
    /// A boolean.
    Bool(bool),
}

/// An item whose K/V depends on more than its placeholder tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Media {
    start: usize,
    /// Number of its tokens that are in the prompt.
    len: usize,
    /// Number of all its tokens: its K/V depends on it, however many of them a truncation has left.
    whole: usize,
    digest: KeyValue,
}

impl Media {
    /// An item of `len` tokens from position `start` on; `digest`: of its content, at full width.
    pub fn new(digest: KeyValue, start: usize, len: usize) -> Self {
        Self { start, len, whole: len, digest }
    }

    /// Its key in the block that begins at position `first`.
    fn frame(&self, first: usize, to: &mut Vec<u8>) {
        let is_cut = self.len < self.whole;
        self.digest.frame(if is_cut { CUT_MEDIA } else { MEDIA }, to);
        to.extend((first as i64 - self.start as i64).to_le_bytes());
        to.extend((self.whole as u64).to_le_bytes());
        if is_cut {
            to.extend((self.len as u64).to_le_bytes());
        }
    }
}

/// All extra keys of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// The adapter (LoRA) whose weights computed the K/V.
    pub adapter: Option<KeyValue>,
    /// The tenant; chosen by the trusted side, never by the client.
    pub salt: Option<KeyValue>,
    /// Items in the prompt.
    pub media: Vec<Media>,
}

const ADAPTER: u8 = 1;
const SALT: u8 = 2;
const MEDIA: u8 = 3;
const CUT_MEDIA: u8 = 4;

impl KeyValue {
    fn frame(&self, kind: u8, to: &mut Vec<u8>) {
        let (tag, value): (u8, &[u8]) = match self {
            Self::Text(text) => (1, text.as_bytes()),
            Self::Bytes(bytes) => (2, bytes),
            Self::Int(int) => (3, &int.to_le_bytes()),
            Self::Bool(bool) => (4, &[u8::from(*bool)]),
        };
        to.extend([kind, tag]);
        to.extend((value.len() as u32).to_le_bytes());
        to.extend(value);
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Bytes(bytes) => bytes.is_empty(),
            Self::Int(_) | Self::Bool(_) => false,
        }
    }
}

impl Keys {
    /// Refuse empty values, which look like a key that was left out, and spans outside the prompt.
    pub fn check(&self, num_tokens: usize) -> Result<()> {
        let text = || "a value that is not empty".to_owned();
        for (argument, value) in [("adapter", &self.adapter), ("salt", &self.salt)] {
            if value.as_ref().is_some_and(KeyValue::is_empty) {
                return Err(Error::Value { argument, got: 0, expected: text() });
            }
        }
        for (row, item) in self.media.iter().enumerate() {
            let end = item.start.checked_add(item.len);
            if item.len == 0 || end.is_none_or(|end| end > num_tokens) {
                let expected = format!("a span of 1 token or more within the prompt's {num_tokens}");
                return Err(Error::Row { argument: "media", row, got: item.start as i64, expected });
            }
            if item.digest.is_empty() {
                return Err(Error::Row { argument: "media", row, got: 0, expected: text() });
            }
        }
        Ok(())
    }

    /// The framed keys of the namespace; empty for the default one.
    pub fn namespace(&self) -> Arc<[u8]> {
        let mut bytes = Vec::new();
        if let Some(adapter) = &self.adapter {
            adapter.frame(ADAPTER, &mut bytes);
        }
        if let Some(salt) = &self.salt {
            salt.frame(SALT, &mut bytes);
        }
        bytes.into()
    }

    /// The framed media keys of each block that an item overlaps, by block, for a prompt of any length.
    pub fn extras(&self, block_size: usize) -> Vec<(usize, Arc<[u8]>)> {
        let mut media = self.media.clone();
        // By the whole length: cutting a prompt shortens items and must not change the order of different ones.
        media.sort_by(|a, b| (a.start, &a.digest, a.whole).cmp(&(b.start, &b.digest, b.whole)));
        let mut framed: std::collections::BTreeMap<usize, Vec<u8>> = std::collections::BTreeMap::new();
        for item in &media {
            for block in item.start / block_size..=(item.start + item.len - 1) / block_size {
                item.frame(block * block_size, framed.entry(block).or_default());
            }
        }
        framed.into_iter().map(|(block, bytes)| (block, bytes.into())).collect()
    }

    /// The keys of the first `len` tokens. An item that is cut short is like no other: what its tokens had for K/V was
    /// computed with all of it, and what follows the cut is something else.
    pub fn cut(&self, len: usize) -> Self {
        let media = self.media.iter().filter(|item| item.start < len);
        let media = media.map(|item| Media { len: item.len.min(len - item.start), ..item.clone() }).collect();
        Self { media, ..self.clone() }
    }
}

/// Whether the framed namespace keys hold all of `wanted`: the part of a namespace that a caller names.
pub(crate) fn namespace_matches(namespace: &[u8], wanted: &Keys) -> bool {
    let holds = |kind: u8, value: &Option<KeyValue>| {
        value.as_ref().is_none_or(|value| {
            let mut framed = Vec::new();
            value.frame(kind, &mut framed);
            frames(namespace).any(|frame| frame == framed)
        })
    };
    holds(ADAPTER, &wanted.adapter) && holds(SALT, &wanted.salt)
}

/// The single framed keys of a namespace.
fn frames(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let len = bytes.get(2..6)?.try_into().map(u32::from_le_bytes).ok()? as usize;
        let (frame, rest) = bytes.split_at_checked(6 + len)?;
        bytes = rest;
        Some(frame)
    })
}
