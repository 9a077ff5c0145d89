"""How a text becomes windows."""

import numpy as np
import pytest

from kvblocks.quality.text import cut
from kvblocks.report import UserError

IDS = np.arange(100, 120)


@pytest.mark.parametrize("start", [(), (1,), (1, 2, 3)])
def test_windows_follow_one_another_and_each_has_its_beginning(start: tuple[int, ...]) -> None:
    windows, rest = cut(IDS, 3, 6, start=start)
    assert windows.shape == (3, 6)
    assert windows[:, : len(start)].tolist() == [list(start)] * 3
    assert [*windows[:, len(start) :].reshape(-1), *rest] == IDS.tolist()


def test_no_windows_leave_the_whole_text() -> None:
    windows, rest = cut(IDS, 0, 6, start=(1,))
    assert windows.shape == (0, 6)
    assert rest.tolist() == IDS.tolist()


@pytest.mark.parametrize(
    ("num_windows", "window_tokens", "start", "message"),
    [
        (4, 6, (), "the text has 20 tokens: 4 windows of 6 tokens need 24"),
        (4, 7, (1,), "the text has 20 tokens: 4 windows of 7 tokens need 24"),
        (1, 2, (1, 2), "a window of 2 tokens has no room for text: 2 begin every sequence"),
    ],
)
def test_texts_that_are_too_short(
    num_windows: int, window_tokens: int, start: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        cut(IDS, num_windows, window_tokens, start=start)
