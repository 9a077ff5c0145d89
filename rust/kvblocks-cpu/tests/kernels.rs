//! The kernels against plain float64 loops, and against arguments that make no sense.

use half::{bf16, f16};
use kvblocks_cpu::{
    attend, copy_blocks, gather, merge_states, write, write_converted, Batch, Cache, Element, Error, Options,
    Output, Paged,
};
use proptest::prelude::*;

const PLAIN: Options<'static> =
    Options { scale: 0.25, window: None, soft_cap: None, sinks: None, alibi_slopes: None };

/// Reproducible values in -2..2.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

fn rounded<T: Element>(source: &[f32]) -> Vec<T> {
    let mut row = vec![T::ZERO; source.len()];
    T::narrow(source, &mut row);
    row
}

fn widened<T: Element>(source: &[T]) -> Vec<f32> {
    T::widen(source, &mut Vec::new()).to_vec()
}

/// Output and log-sum-exp of one head from rows of float32 keys and values.
fn naive(q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], scale: f64) -> (Vec<f64>, f64) {
    let logits: Vec<f64> = keys
        .iter()
        .map(|key| scale * q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>())
        .collect();
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|logit| (logit - highest).exp()).sum();
    let mut out = vec![0.0; values[0].len()];
    for (logit, value) in logits.iter().zip(values) {
        for (out, &value) in out.iter_mut().zip(value) {
            *out += (logit - highest).exp() / total * f64::from(value);
        }
    }
    (out, highest + total.ln())
}

/// Writes a sequence of 130 tokens (three tiles) and lets its last 3 positions attend.
fn check_against_naive<T: Element>(
    make: fn(usize, usize, usize, usize) -> kvblocks_cpu::Result<Paged>,
    limit: f64,
) -> kvblocks_cpu::Result<()> {
    let (tokens, heads, group, dim, dim_v, block_size) = (130, 2, 3, 20, 9, 7);
    let table: Vec<i32> = (1..20).rev().collect();
    let slots: Vec<i64> = (0..tokens)
        .map(|position| i64::from(table[position / block_size]) * 7 + (position % block_size) as i64)
        .collect();
    let (k_paged, v_paged) = (make(20, 7, heads, dim)?, make(20, 7, heads, dim_v)?);
    let nan = rounded::<T>(&[f32::NAN])[0];
    let (mut k, mut v) = (vec![nan; 20 * 7 * heads * dim], vec![nan; 20 * 7 * heads * dim_v]);
    let k_rows = rounded::<T>(&values(tokens * heads * dim, 1));
    let v_rows = rounded::<T>(&values(tokens * heads * dim_v, 2));
    write(&mut k, &k_paged, &k_rows, &slots)?;
    write_converted(&mut v, &v_paged, &widened(&v_rows), &slots)?;

    let q = values(3 * heads * group * dim, 3);
    let mut out = vec![f32::NAN; 3 * heads * group * dim_v];
    let mut lse = vec![f32::NAN; 3 * heads * group];
    attend(
        &q,
        heads * group,
        Cache { data: &k, paged: k_paged },
        Cache { data: &v, paged: v_paged },
        Batch { block_tables: &table, max_blocks: 19, seq_lens: &[130], query_start_loc: &[0, 3] },
        PLAIN,
        Output { out: &mut out, lse: Some(&mut lse) },
    )?;

    let row = |rows: &[T], token: usize, head: usize, dim: usize| {
        widened(&rows[(token * heads + head) * dim..][..dim])
    };
    for (unit, q) in q.chunks(dim).enumerate() {
        let (query, head) = (unit / (heads * group), unit % (heads * group) / group);
        let keys: Vec<_> = (0..128 + query).map(|token| row(&k_rows, token, head, dim)).collect();
        let vals: Vec<_> = (0..128 + query).map(|token| row(&v_rows, token, head, dim_v)).collect();
        let (expected, expected_lse) = naive(q, &keys, &vals, 0.25);
        let got = &out[unit * dim_v..][..dim_v];
        let error: f64 = got.iter().zip(&expected).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
        let norm: f64 = expected.iter().map(|b| b * b).sum();
        assert!(error.sqrt() <= limit * norm.sqrt(), "unit {unit}: {got:?} {expected:?}");
        assert!((f64::from(lse[unit]) - expected_lse).abs() < 1e-4);
    }

    let (mut k_out, mut v_out) = (vec![0.0; k_rows.len()], vec![0.0; v_rows.len()]);
    gather(Cache { data: &k, paged: k_paged }, &table, tokens, &mut k_out)?;
    gather(Cache { data: &v, paged: v_paged }, &table, tokens, &mut v_out)?;
    assert_eq!(k_out, widened(&k_rows));
    assert_eq!(v_out, widened(&v_rows));
    Ok(())
}

#[test]
fn attention_agrees_with_plain_loops() -> kvblocks_cpu::Result<()> {
    // The queries and outputs are f32, so the cache's own rounding is not an error.
    check_against_naive::<f32>(Paged::nhd, 1e-5)?;
    check_against_naive::<f32>(Paged::hnd, 1e-5)?;
    check_against_naive::<f16>(Paged::nhd, 1e-5)?;
    check_against_naive::<bf16>(Paged::hnd, 1e-5)
}

#[test]
fn copies_whole_blocks_from_source_to_destination() {
    for make in [Paged::nhd, Paged::hnd] {
        let paged = make(4, 3, 2, 5).unwrap();
        let before = values(4 * 30, 9);
        let mut cache = before.clone();
        copy_blocks(&mut cache, &paged, &[[3, 0], [3, 1]]).unwrap();
        assert_eq!(cache[..30], before[90..]);
        assert_eq!(cache[30..60], before[90..]);
        assert_eq!(cache[60..], before[60..]);
    }
}

#[test]
fn an_empty_state_takes_no_part() {
    let (out, lse) = (values(6, 1), values(2, 2));
    let (nan, none) = ([f32::NAN; 6], [f32::NEG_INFINITY; 2]);
    let (mut merged, mut merged_lse) = ([0.0; 6], [0.0; 2]);
    merge_states((&out, &lse), (&nan, &none), 3, &mut merged, &mut merged_lse).unwrap();
    assert_eq!((&merged[..], &merged_lse[..]), (&out[..], &lse[..]));
    merge_states((&nan, &none), (&nan, &none), 3, &mut merged, &mut merged_lse).unwrap();
    assert_eq!((merged, merged_lse), ([0.0; 6], none));
}

#[test]
fn errors_carry_the_numbers() {
    let paged = Paged::nhd(2, 4, 1, 3).unwrap();
    let mut cache = [7.0f32; 24];
    let rows = [1.0f32; 9];
    let wrong = |row, got| Error::Row { argument: "slot_mapping", row, got, low: -1, high: 7 };
    assert_eq!(write(&mut cache, &paged, &rows, &[0, 8, 1]), Err(wrong(1, 8)));
    assert_eq!(write(&mut cache, &paged, &rows, &[0, 1, -2]), Err(wrong(2, -2)));
    let short = Error::Length { argument: "rows", got: 9, expected: 12 };
    assert_eq!(write(&mut cache, &paged, &rows, &[0, 1, 2, 3]), Err(short));
    let small = Error::Length { argument: "cache", got: 23, expected: 24 };
    assert_eq!(write(&mut cache[1..], &paged, &rows, &[0]), Err(small));
    let outside = Error::Row { argument: "copies", row: 1, got: 2, low: 0, high: 1 };
    assert_eq!(copy_blocks(&mut cache, &paged, &[[0, 1], [0, 2]]), Err(outside));
    assert_eq!(cache, [7.0; 24]);
    let message = wrong(1, 8).to_string();
    assert_eq!(message, "slot_mapping: row 1 is 8, expected -1..=7");
}

/// Sizes that fit, or that overflow when multiplied.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0usize..5, 1 => Just(usize::MAX), 1 => Just(1 << 40)]
}

fn geometry() -> impl Strategy<Value = Paged> {
    let anything =
        [(); 7].map(|()| size()).prop_map(|[a, b, c, num_blocks, block_size, num_heads, head_dim]| Paged {
            block_stride: a,
            token_stride: b,
            head_stride: c,
            num_blocks,
            block_size,
            num_heads,
            head_dim,
        });
    let dense = (1usize..5, 1usize..5, 1usize..4, 1usize..4)
        .prop_filter_map("overflow", |(a, b, c, d)| Paged::hnd(a, b, c, d).ok());
    prop_oneof![1 => anything, 2 => dense]
}

/// Indices that are mostly near the valid ones.
fn index() -> impl Strategy<Value = i32> {
    prop_oneof![8 => -1i32..6, 1 => Just(i32::MIN), 1 => Just(i32::MAX)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the arguments, a kernel returns; and after an error nothing has changed.
    #[test]
    fn no_argument_panics(
        k in geometry(),
        v in geometry(),
        agree in any::<bool>(),
        len in prop_oneof![1 => 0usize..200, 3 => Just(200usize)],
        (q_heads, max_blocks, window) in (size(), size(), proptest::option::of(size())),
        rows in proptest::collection::vec((index(), index()), 0..4),
        table in proptest::collection::vec(index(), 0..12),
        fit in any::<bool>(),
        slots in proptest::collection::vec(prop_oneof![-2i64..12, Just(i64::MAX)], 0..6),
    ) {
        let v = if agree { Paged { head_dim: v.head_dim, ..k } } else { v };
        let data = vec![1.0f32; len];
        let mut cache = data.clone();
        if write(&mut cache, &k, &data, &slots).is_err() {
            prop_assert_eq!(&cache, &data);
        }
        let copies: Vec<[i32; 2]> = rows.iter().map(|&(src, dst)| [src, dst]).collect();
        let _ = copy_blocks(&mut cache, &k, &copies);
        let mut out = vec![5.0; len];
        if gather(Cache { data: &data, paged: k }, &table, q_heads, &mut out).is_err() {
            prop_assert_eq!(&out, &vec![5.0; len]);
        }
        let _ = merge_states((&data, &out), (&data, &out), q_heads, &mut cache, &mut vec![0.0; rows.len()]);

        let (seq_lens, ends): (Vec<i32>, Vec<i32>) = rows.into_iter().unzip();
        let mut starts: Vec<i32> = std::iter::once(0).chain(ends).collect();
        if fit {
            starts.sort_unstable();
            starts.iter_mut().for_each(|start| *start = (*start).clamp(0, 3));
            starts[0] = 0;
        }
        let needed = seq_lens.len().saturating_mul(max_blocks);
        let table = if fit && needed < 50 { table.into_iter().cycle().take(needed).collect() } else { table };
        let q_heads = if fit { k.num_heads.saturating_mul(2) } else { q_heads };
        let tokens = 3usize;
        let sized = |sizes: [usize; 3]| sizes.iter().try_fold(1, |a: usize, &b| a.checked_mul(b)).filter(|&n| n < 500);
        let q = vec![0.5f32; sized([tokens, q_heads, k.head_dim]).unwrap_or(3)];
        let mut out = vec![5.0f32; sized([tokens, q_heads, v.head_dim]).unwrap_or(3)];
        let batch = Batch { block_tables: &table, max_blocks, seq_lens: &seq_lens, query_start_loc: &starts };
        let result = attend(
            &q,
            q_heads,
            Cache { data: &data, paged: k },
            Cache { data: &data, paged: v },
            batch,
            Options { window, ..PLAIN },
            Output { out: &mut out, lse: None },
        );
        match result {
            Ok(()) => prop_assert!(out.iter().all(|value| value.is_finite() && *value != 5.0)),
            Err(_) => prop_assert!(out.iter().all(|value| *value == 5.0)),
        }
    }
}
