//! The kernels against plain float64 loops, and against arguments that make no sense.

use half::{bf16, f16};
use kvblocks_cpu::{
    amax_of_columns, attend, copy_blocks, gather, merge_states, read_all, read_blocks, write, Batch, Cache,
    CacheMut, E4m3, E5m2, Elements, ElementsMut, Error, Execution, Groups, GroupsMut, Isa, Losses, Options,
    Output, Paged, Queries, Scaling, ScalingMut, Storage,
};
use proptest::prelude::*;

const PLAIN: Options<'static> =
    Options { scale: 0.25, window: None, soft_cap: None, sinks: None, alibi_slopes: None };

/// Every instruction set of this machine, on one thread and on more threads than there are units in a small case.
fn executions() -> Vec<Execution> {
    let isas = Isa::NAMES.iter().filter_map(|name| Isa::named(name));
    isas.flat_map(|isa| [1, 3].map(|num_threads| Execution { isa, num_threads })).collect()
}

/// An element type: the conversions of the crate that defines it, and its place among the elements.
trait Element: Copy {
    fn round(value: f32) -> Self;
    fn value(self) -> f32;
    fn elements(slice: &[Self]) -> Elements<'_>;
    fn elements_mut(slice: &mut [Self]) -> ElementsMut<'_>;
}

macro_rules! element {
    ($type:ty, $kind:ident, $round:expr, $value:expr) => {
        impl Element for $type {
            fn round(value: f32) -> Self {
                $round(value)
            }

            fn value(self) -> f32 {
                $value(self)
            }

            fn elements(slice: &[Self]) -> Elements<'_> {
                Elements::$kind(slice)
            }

            fn elements_mut(slice: &mut [Self]) -> ElementsMut<'_> {
                ElementsMut::$kind(slice)
            }
        }
    };
}

element!(f32, F32, |value| value, |value| value);
element!(f16, F16, f16::from_f32, f16::to_f32);
element!(bf16, Bf16, bf16::from_f32, bf16::to_f32);

fn plain(data: Elements<'_>, paged: Paged) -> Cache<'_> {
    Cache { data, paged, scaling: Scaling::None }
}

fn plain_mut(data: ElementsMut<'_>, paged: Paged) -> CacheMut<'_> {
    CacheMut { data, paged, scaling: ScalingMut::None }
}

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
    source.iter().copied().map(T::round).collect()
}

fn widened<T: Element>(source: &[T]) -> Vec<f32> {
    source.iter().copied().map(T::value).collect()
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
    how: Execution,
) -> kvblocks_cpu::Result<()> {
    // The queries and outputs are f32, so the cache's own rounding is not an error.
    let limit = 1e-5;
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
    write(plain_mut(T::elements_mut(&mut k), k_paged), T::elements(&k_rows), &slots, None, how)?;
    write(plain_mut(T::elements_mut(&mut v), v_paged), Elements::F32(&widened(&v_rows)), &slots, None, how)?;

    let q = values(3 * heads * group * dim, 3);
    let mut out = vec![f32::NAN; 3 * heads * group * dim_v];
    let mut lse = vec![f32::NAN; 3 * heads * group];
    attend(
        Queries { data: Elements::F32(&q), num_heads: heads * group },
        Storage { k: plain(T::elements(&k), k_paged), v: plain(T::elements(&v), v_paged), tail: None },
        Batch { block_tables: &table, max_blocks: 19, seq_lens: &[130], query_start_loc: &[0, 3] },
        PLAIN,
        Output { out: ElementsMut::F32(&mut out), lse: Some(&mut lse) },
        how,
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
    gather(plain(T::elements(&k), k_paged), &table, tokens, &mut k_out, how)?;
    gather(plain(T::elements(&v), v_paged), &table, tokens, &mut v_out, how)?;
    assert_eq!(k_out, widened(&k_rows));
    assert_eq!(v_out, widened(&v_rows));
    Ok(())
}

#[test]
fn attention_agrees_with_plain_loops() -> kvblocks_cpu::Result<()> {
    for how in executions() {
        check_against_naive::<f32>(Paged::nhd, how)?;
        check_against_naive::<f32>(Paged::hnd, how)?;
        check_against_naive::<f16>(Paged::nhd, how)?;
        check_against_naive::<bf16>(Paged::hnd, how)?;
    }
    Ok(())
}

/// Codes of 8 bits with scales of a token and head, zeros and the largest among them, under queries of bf16: within what
/// rounding weights and results to bf16 may cost.
#[test]
fn queries_of_bf16_over_every_code_agree_with_plain_loops() -> kvblocks_cpu::Result<()> {
    let (tokens, heads, group, dim) = (67usize, 2usize, 4usize, 64usize);
    let paged = Paged::nhd(tokens, 1, heads, dim)?;
    let row = heads * dim;
    // Every code, -128 included; of FP8 the NaNs are left out.
    let bytes: Vec<u8> = (0..tokens * row).map(|at| (at * 37 % 256) as u8).collect();
    let signed: Vec<i8> = bytes.iter().map(|&byte| byte as i8).collect();
    let numbers: Vec<u8> =
        bytes.iter().map(|&byte| if byte & 0x78 == 0x78 { byte & 0x87 } else { byte }).collect();
    let scales: Vec<f32> = (0..tokens * heads)
        .map(|at| match at % 5 {
            0 => 0.0,
            1 => 1e-36,
            2 => 1e-3,
            3 => 0.02,
            _ => 0.07,
        })
        .collect();
    let q: Vec<bf16> = rounded(&values(heads * group * dim, 3));
    let wide_q = widened(&q);
    let table: Vec<i32> = (0..tokens as i32).rev().collect();
    let cases: [(Elements<'_>, Vec<f32>); 3] = [
        (Elements::I8(&signed), signed.iter().map(|&code| f32::from(code)).collect()),
        (Elements::E4m3(E4m3::from_bytes(&numbers)), numbers.iter().map(|&code| fp8(code, 3, 7)).collect()),
        (Elements::E5m2(E5m2::from_bytes(&numbers)), numbers.iter().map(|&code| fp8(code, 2, 15)).collect()),
    ];
    for how in executions() {
        for (data, codes) in &cases {
            let cache = Cache { data: *data, paged, scaling: Scaling::TokenHead(&scales) };
            let mut out = vec![bf16::NAN; heads * group * dim];
            let mut lse = vec![f32::NAN; heads * group];
            attend(
                Queries { data: Elements::Bf16(&q), num_heads: heads * group },
                Storage { k: cache, v: cache, tail: None },
                Batch {
                    block_tables: &table,
                    max_blocks: tokens,
                    seq_lens: &[tokens as i32],
                    query_start_loc: &[0, 1],
                },
                PLAIN,
                Output { out: ElementsMut::Bf16(&mut out), lse: Some(&mut lse) },
                how,
            )?;
            for (unit, q) in wide_q.chunks(dim).enumerate() {
                let head = unit / group;
                let rows: Vec<Vec<f32>> = (0..tokens)
                    .rev()
                    .map(|token| {
                        let scale = scales[token * heads + head];
                        codes[token * row + head * dim..][..dim].iter().map(|code| code * scale).collect()
                    })
                    .collect();
                let (expected, expected_lse) = naive(q, &rows, &rows, 0.25);
                let distance = |(value, want): (&f32, &f64)| (f64::from(*value) - want).abs() as f32;
                let distances: Vec<Vec<f32>> =
                    rows.iter().map(|row| row.iter().zip(&expected).map(distance).collect()).collect();
                let (mean_distance, _) = naive(q, &rows, &distances, 0.25);
                let limit = 1e-4 + 1e-6 * expected_lse.abs();
                assert!((f64::from(lse[unit]) - expected_lse).abs() < limit, "{how:?}: {}", lse[unit]);
                for ((&got, want), distance) in
                    out[unit * dim..][..dim].iter().zip(&expected).zip(&mean_distance)
                {
                    let limit = 1.01 / 256.0 * (want.abs() + distance);
                    assert!((f64::from(got.to_f32()) - want).abs() <= limit, "{how:?}: {got}, not {want}");
                }
            }
        }
    }
    Ok(())
}

/// The value of an 8-bit float.
fn fp8(code: u8, mantissa: i32, bias: i32) -> f32 {
    let (exponent, fraction) = (i32::from(code & 0x7F) >> mantissa, i32::from(code) & ((1 << mantissa) - 1));
    let (fraction, power) =
        if exponent == 0 { (fraction, 1) } else { (fraction + (1 << mantissa), exponent) };
    let magnitude = fraction as f32 * 2.0f32.powi(power - bias - mantissa);
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// All bit patterns of 16 bits, and f32 values around every rounding boundary of the 16-bit types.
#[test]
fn conversions_agree_with_the_types_own() -> kvblocks_cpu::Result<()> {
    fn check<T: Element>(to_bits: fn(T) -> u16, how: Execution) -> kvblocks_cpu::Result<()> {
        let every: Vec<f32> = (0..=u32::from(u16::MAX))
            .flat_map(|high| {
                [0u32, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| high << 16 | low)
            })
            .map(f32::from_bits)
            .collect();
        let paged = Paged::nhd(every.len(), 1, 1, 1)?;
        let slots: Vec<i64> = (0..every.len() as i64).collect();
        let mut stored = vec![T::round(0.0); every.len()];
        write(plain_mut(T::elements_mut(&mut stored), paged), Elements::F32(&every), &slots, None, how)?;
        for (&value, &got) in every.iter().zip(&stored) {
            let expected = T::round(value);
            assert!(
                to_bits(got) == to_bits(expected) || (got.value().is_nan() && value.is_nan()),
                "{how:?}: {value:e} became {:#x}, not {:#x}",
                to_bits(got),
                to_bits(expected)
            );
        }
        let table: Vec<i32> = (0..every.len() as i32).collect();
        let mut values = vec![0.0; every.len()];
        gather(plain(T::elements(&stored), paged), &table, every.len(), &mut values, how)?;
        for (&got, &code) in values.iter().zip(&stored) {
            assert!(got.to_bits() == code.value().to_bits() || (got.is_nan() && code.value().is_nan()));
        }
        Ok(())
    }
    for how in executions() {
        check::<f16>(f16::to_bits, how)?;
        check::<bf16>(bf16::to_bits, how)?;
    }
    Ok(())
}

/// Decode and a chunk, long enough for several splits, on any number of threads: the same bits.
#[test]
fn the_number_of_threads_changes_no_bit() -> kvblocks_cpu::Result<()> {
    let (heads, group, dim, block_size, tokens) = (2, 3, 24, 16, 1700);
    let paged = Paged::nhd(tokens / block_size + 2, block_size, heads, dim)?;
    let len = paged.num_slots() * heads * dim;
    let (k, v) = (values(len, 1), values(len, 2));
    let table: Vec<i32> =
        (0..2 * (paged.num_blocks as i32)).map(|column| column % paged.num_blocks as i32).collect();
    for isa in Isa::NAMES.iter().filter_map(|name| Isa::named(name)) {
        for num_queries in [1, 2, 40] {
            let q = values((num_queries + 1) * heads * group * dim, 3);
            let mut results = [1, 2, 3, 4, 7].map(|num_threads| {
                let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; q.len() / dim]);
                attend(
                    Queries { data: Elements::F32(&q), num_heads: heads * group },
                    Storage {
                        k: plain(Elements::F32(&k), paged),
                        v: plain(Elements::F32(&v), paged),
                        tail: None,
                    },
                    Batch {
                        block_tables: &table,
                        max_blocks: paged.num_blocks,
                        seq_lens: &[tokens as i32, 33],
                        query_start_loc: &[0, num_queries as i32, num_queries as i32 + 1],
                    },
                    PLAIN,
                    Output { out: ElementsMut::F32(&mut out), lse: Some(&mut lse) },
                    Execution { isa, num_threads },
                )
                .map(|()| (out, lse))
            });
            let first = std::mem::replace(&mut results[0], Ok((Vec::new(), Vec::new())))?;
            for other in results.into_iter().skip(1) {
                assert_eq!(other?, first);
            }
        }
    }
    Ok(())
}

#[test]
fn copies_whole_blocks_from_source_to_destination() {
    for make in [Paged::nhd, Paged::hnd] {
        let paged = make(4, 3, 2, 5).unwrap();
        let before = values(4 * 30, 9);
        for how in executions() {
            let mut cache = before.clone();
            copy_blocks(ElementsMut::F32(&mut cache), &paged, &[[3, 0], [3, 1]], how).unwrap();
            assert_eq!(cache[..30], before[90..]);
            assert_eq!(cache[30..60], before[90..]);
            assert_eq!(cache[60..], before[60..]);
            // In order, where a destination is a source.
            copy_blocks(ElementsMut::F32(&mut cache), &paged, &[[2, 0], [0, 1]], how).unwrap();
            assert_eq!(cache[..30], before[60..90]);
            assert_eq!(cache[30..60], before[60..90]);
        }
    }
}

#[test]
fn an_empty_state_takes_no_part() {
    let (out, lse) = (values(6, 1), values(2, 2));
    let (nan, none) = ([f32::NAN; 6], [f32::NEG_INFINITY; 2]);
    let (full, empty) = ((Elements::F32(&out), &lse[..]), (Elements::F32(&nan), &none[..]));
    for how in executions() {
        let (mut merged, mut merged_lse) = ([0.0; 6], [0.0; 2]);
        merge_states(full, empty, 3, ElementsMut::F32(&mut merged), &mut merged_lse, how).unwrap();
        assert_eq!((&merged[..], &merged_lse[..]), (&out[..], &lse[..]));
        merge_states(empty, empty, 3, ElementsMut::F32(&mut merged), &mut merged_lse, how).unwrap();
        assert_eq!((merged, merged_lse), ([0.0; 6], none));
    }
}

#[test]
fn errors_carry_the_numbers() {
    let paged = Paged::nhd(2, 4, 1, 3).unwrap();
    let mut cache = [7.0f32; 24];
    let rows = [1.0f32; 9];
    let how = executions()[0];
    let store = |cache: &mut [f32], slots: &[i64]| {
        write(plain_mut(ElementsMut::F32(cache), paged), Elements::F32(&rows), slots, None, how)
    };
    let wrong = |problem: &str| Err(Error::Index { argument: "slot_mapping", problem: problem.to_owned() });
    let allowed = "expected -1 (skip) or one of the cache's 8 slots";
    assert_eq!(store(&mut cache, &[0, 8, 1]), wrong(&format!("row 1 is slot 8, {allowed}")));
    assert_eq!(store(&mut cache, &[0, 1, -2]), wrong(&format!("row 2 is slot -2, {allowed}")));
    assert_eq!(store(&mut cache, &[3, -1, -1, 1, 3]), wrong("rows 0 and 4 both name slot 3"));
    let short = Error::Length { argument: "rows", got: 9, expected: 12 };
    assert_eq!(store(&mut cache, &[0, 1, 2, 3]), Err(short));
    let small = Error::Length { argument: "cache", got: 23, expected: 24 };
    assert_eq!(store(&mut cache[1..], &[0]), Err(small));
    let problem = "row 1 is 0 -> 2, the cache has 2 blocks".to_owned();
    let outside = Error::Index { argument: "copies", problem };
    assert_eq!(copy_blocks(ElementsMut::F32(&mut cache), &paged, &[[0, 1], [0, 2]], how), Err(outside));
    assert_eq!(cache, [7.0; 24]);
    let message = store(&mut cache, &[3, 3]).unwrap_err().to_string();
    assert_eq!(message, "slot_mapping: rows 0 and 1 both name slot 3");
}

#[test]
fn blocks_are_read_where_a_table_has_them() {
    let elements: Vec<f32> = (0..3 * 256).map(|element| (element / 256) as f32).collect();
    for how in executions() {
        let read = |table: &[i32]| read_blocks(&elements, 256, table, how);
        assert_eq!(read(&[2, 0, 1]), Ok(read_all(&elements, how)));
        assert_eq!(read(&[1]), Ok(256.0));
        let problem = "row 1 is block 3, there are 3 blocks".to_owned();
        assert_eq!(read(&[0, 3]), Err(Error::Index { argument: "table", problem }));
        assert!(read(&[-1]).is_err() && read_blocks(&[], 0, &[0], how).is_err());
    }
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
        let how = Execution { isa: Isa::best(), num_threads: 2 };
        let v = if agree { Paged { head_dim: v.head_dim, ..k } } else { v };
        let data = vec![1.0f32; len];
        let mut cache = data.clone();
        if write(plain_mut(ElementsMut::F32(&mut cache), k), Elements::F32(&data), &slots, None, how).is_err() {
            prop_assert_eq!(&cache, &data);
        }
        let copies: Vec<[i32; 2]> = rows.iter().map(|&(src, dst)| [src, dst]).collect();
        let _ = copy_blocks(ElementsMut::F32(&mut cache), &k, &copies, how);
        let mut out = vec![5.0; len];
        if gather(plain(Elements::F32(&data), k), &table, q_heads, &mut out, how).is_err() {
            prop_assert_eq!(&out, &vec![5.0; len]);
        }
        let state = (Elements::F32(&data), &out[..]);
        let _ = merge_states(state, state, q_heads, ElementsMut::F32(&mut cache), &mut vec![0.0; rows.len()], how);

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
            Queries { data: Elements::F32(&q), num_heads: q_heads },
            Storage { k: plain(Elements::F32(&data), k), v: plain(Elements::F32(&data), v), tail: None },
            batch,
            Options { window, ..PLAIN },
            Output { out: ElementsMut::F32(&mut out), lse: None },
            how,
        );
        match result {
            Ok(()) => prop_assert!(out.iter().all(|value| value.is_finite() && *value != 5.0)),
            Err(_) => prop_assert!(out.iter().all(|value| *value == 5.0)),
        }
    }

    /// The same of formats with groups; and what any number of threads writes is the same.
    #[test]
    fn no_groups_panic(
        paged in geometry(),
        (size, bits, of_tokens) in (prop_oneof![0usize..4, Just(32), Just(64)], 1usize..6, any::<bool>()),
        (fit, num_scales) in (any::<bool>(), 0usize..40),
        slots in prop_oneof![
            proptest::collection::vec(prop_oneof![-2i64..12, Just(i64::MAX)], 0..6),
            (0i64..12).prop_map(|last| (0..last).rev().collect()),
        ],
        table in proptest::collection::vec(index(), 0..4),
    ) {
        let (data, rows) = (vec![0u8; 200], values(800, 1));
        let dim = paged.head_dim.saturating_mul(8 / bits);
        let groups = if of_tokens { dim } else { dim.div_ceil(size.max(1)) };
        let tokens = if of_tokens { paged.num_slots() / size.max(1) } else { paged.num_slots() };
        let needed = tokens.saturating_mul(paged.num_heads).saturating_mul(groups);
        let len = if fit && needed < 5000 { needed } else { num_scales };
        let results = [1, 3].map(|num_threads| {
            let how = Execution { isa: Isa::best(), num_threads };
            let (mut cache, mut scale, mut zero) = (data.clone(), vec![f16::ONE; len], vec![f16::ONE; len]);
            let made = GroupsMut { size, bits, scale: &mut scale, zero: &mut zero };
            let scaling = if of_tokens { ScalingMut::TokenGroup(made) } else { ScalingMut::Group(made) };
            let target = CacheMut { data: ElementsMut::Packed(&mut cache), paged, scaling };
            let mut losses = Losses::default();
            let result = write(target, Elements::F32(&rows), &slots, Some(&mut losses), how);
            (result, cache, scale, zero, losses)
        });
        prop_assert_eq!(&results[0], &results[1]);
        let [(result, cache, scale, zero, _), _] = results;
        if result.is_err() {
            prop_assert_eq!(&cache, &data);
            prop_assert!(scale.iter().chain(&zero).all(|&each| each == f16::ONE));
        }
        let read = Groups { size, bits, scale: &scale, zero: &zero };
        let scaling = if of_tokens { Scaling::TokenGroup(read) } else { Scaling::Group(read) };
        let mut out = vec![5.0; 4usize.saturating_mul(paged.num_heads).saturating_mul(dim).min(2000)];
        let how = Execution { isa: Isa::best(), num_threads: 2 };
        if gather(Cache { data: Elements::Packed(&cache), paged, scaling }, &table, 4, &mut out, how).is_err() {
            prop_assert!(out.iter().all(|&value| value == 5.0));
        }
    }

    /// The largest magnitudes of columns, whose number may make no sense.
    #[test]
    fn no_columns_panic(num_values in 0usize..20, num_columns in prop_oneof![0usize..20, Just(1 << 62)]) {
        let rows = values(num_values, 1);
        let how = Execution { isa: Isa::best(), num_threads: 2 };
        match amax_of_columns(Elements::F32(&rows), num_columns, how) {
            Ok(amax) => {
                for (column, amax) in amax.into_iter().enumerate() {
                    let values = rows.iter().skip(column).step_by(num_columns);
                    prop_assert_eq!(amax, values.fold(0.0, |highest: f32, value| highest.max(value.abs())));
                }
            }
            Err(_) => prop_assert!(num_values == 0 || num_columns == 0 || num_values % num_columns != 0),
        }
    }
}
