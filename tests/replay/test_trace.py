"""Columns, token ids, cuts, and conversations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.replay.generate import LENGTHS, LogNormal, generate, parse_lengths
from kvblocks.report import UserError
from kvblocks.traces.trace import MAX_TOKENS

from .helpers import make_trace


def test_tokens_are_equal_where_the_ids_are_and_nowhere_else() -> None:
    trace = make_trace([(0, 10, 2, [0, 1, 2]), (0, 9, 2, [0, 1]), (0, 3, 2, [])], 4)
    assert trace.tokens(0).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert trace.tokens(1).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 4]
    assert trace.tokens(0, 12).tolist()[9:] == [2, 3, 3]
    assert trace.tokens(0, 5).tolist() == [0, 0, 0, 0, 1]
    assert trace.tokens(2).tolist() == [5, 5, 5]
    assert [make_trace([(0, 2, 1, ()), (0, 2, 1, ())]).tokens(i).tolist() for i in (0, 1)] == [[0, 0], [1, 1]]


def test_final_tokens_leave_the_last_one_out() -> None:
    assert make_trace([(0, 10, 1, ()), (0, 10, 5, ())]).final_tokens.tolist() == [10, 14]


def test_truncation_drops_the_oldest_ids() -> None:
    trace = make_trace([(0, 14, 3, [7, 8, 9, 10]), (0, 4, 3, [7]), (0, 5, 30, [7, 8])], 4)
    cut = trace.truncated(10)
    # 16 stored tokens are 6 too many: two ids of 4 go. The third cannot be helped: its output alone is too long.
    assert cut.prompt_tokens.tolist() == [6, 4, 5]
    assert cut.ids.tolist() == [9, 10, 7, 7, 8]
    assert cut.starts.tolist() == [0, 2, 3, 5]
    assert trace.truncated(100) is trace
    assert make_trace([(0, 14, 3, ())]).truncated(10).prompt_tokens.tolist() == [8]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10)), min_size=1, max_size=8),
    st.integers(1, 60),
    st.sampled_from([0, 4]),
)
def test_truncated_requests_fit_where_they_can(
    lengths: list[tuple[int, int]], limit: int, tokens_per_id: int
) -> None:
    rows = [
        (float(at), prompt, output, range(-(-prompt // 4)) if tokens_per_id else ())
        for at, (prompt, output) in enumerate(lengths)
    ]
    trace = make_trace(rows, tokens_per_id)
    cut = trace.truncated(limit)
    for before, after in zip(trace.final_tokens.tolist(), cut.final_tokens.tolist(), strict=True):
        assert after <= before
        assert before > limit or after == before
    assert (np.diff(cut.starts) == (-(-cut.prompt_tokens // 4) if tokens_per_id else 0)).all()


def test_successors_go_on_from_prompt_and_output() -> None:
    rows = [
        (0, 6, 3, [1, 2]),  # goes on in row 3
        (1, 6, 9, [3, 4]),  # row 4 is too short to hold its output
        (2, 5, 1, [1, 5]),  # its full id is not new: a system prompt, not a conversation
        (3, 12, 1, [1, 6, 7]),
        (4, 9, 1, [3, 8, 9]),
        (5, 3, 1, [10]),  # no full id
    ]
    assert make_trace(rows, 4).successors().tolist() == [3, -1, -1, -1, -1, -1]
    sessions = [0, 1, 0, 2, 1, 3]
    assert make_trace(rows, 4, sessions).successors().tolist() == [-1, -1, -1, -1, -1, -1]
    assert make_trace(rows, 4, [0, 1, 2, 0, 1, 3]).successors().tolist() == [3, -1, -1, -1, -1, -1]
    assert make_trace([(0, 4, 1, ())]).successors().tolist() == [-1]


def test_more_requests_a_second() -> None:
    arrival = make_trace([(0, 1, 1, ()), (3, 1, 1, ())]).scaled(2.0).arrival_s
    assert arrival is not None
    assert arrival.tolist() == [0.0, 1.5]


@pytest.mark.parametrize("name", list(LENGTHS))
def test_generated_lengths_have_the_published_means(name: str) -> None:
    trace = generate(20_000, name, rate_per_s=8.0)
    for lengths, of in zip((trace.prompt_tokens, trace.output_tokens), LENGTHS[name], strict=True):
        assert lengths.min() >= 1
        assert lengths.max() <= of.longest_tokens
        assert np.median(lengths) == pytest.approx(of.median_tokens, rel=0.05)
        # Where the longest of the published trace cuts a long tail off, the mean is below.
        assert 0.78 * of.mean_tokens < lengths.mean() < 1.05 * of.mean_tokens
    assert trace.arrival_s is not None
    assert trace.arrival_s[0] == 0
    assert np.diff(trace.arrival_s).mean() == pytest.approx(1 / 8, rel=0.05)


def test_a_seed_makes_the_same_trace() -> None:
    one, two, other = (generate(50, seed=seed).prompt_tokens.tolist() for seed in (3, 3, 4))
    assert one == two != other


def test_generated_prompts_share_their_system_prompt() -> None:
    trace = generate(40, "100,10", shared_prefix_tokens=70, num_prefixes=2, seed=1)
    assert set(trace.prompt_tokens.tolist()) == {170}
    assert (trace.tokens_per_id, np.diff(trace.starts).tolist()) == (16, [10] * 40)
    heads = {tuple(trace.tokens(request)[:64].tolist()) for request in range(40)}
    assert len(heads) == 2
    assert len({tuple(trace.tokens(request)[64:80].tolist()) for request in range(40)}) == 40


@pytest.mark.parametrize(
    "text", ["nonsense", "10", "10,20,30", "10,0", "a,b", "5/10,3", "1/1/1,2", "nan,1", f"{MAX_TOKENS + 1},1"]
)
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--lengths .*: expected azure-conv"):
        parse_lengths(text)
    assert parse_lengths("20/10,7") == (LogNormal(20, 10), LogNormal(7, 7))
