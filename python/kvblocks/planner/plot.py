"""The picture: memory of the cache against concurrent users, one curve a lever, and the budget line.

Owns which levers are drawn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvblocks.planner.levers import Lever
from kvblocks.report import figure, series_style

_GIB: Final = float(1 << 30)
# They mark the first user too many, so that curves that lie on one another are told apart there.
_MARKERS: Final = "os^vD*X"


def plot_levers(path: str | Path, levers: Sequence[Lever]) -> None:
    """Draw memory on each GPU against users of a replica, each with a context of the mean length.

    A curve ends at the first user too many; each legend entry says how many fit. UserError where the file cannot be
    written.
    """
    base = levers[0].scenario
    budget = base.budget.cache_bytes / _GIB
    users = [lever.scenario.users_per_replica(lever.scenario.lengths.mean_tokens) for lever in levers]
    with figure(path, width_inches=11, height_inches=6) as axes:
        for index, (lever, most) in enumerate(zip(levers, users, strict=True)):
            tokens = lever.scenario.lengths.mean_tokens
            sizes = [lever.scenario.bytes_for(count, tokens) / _GIB for count in (1, most + 1)]
            style = series_style(index) | {
                "linewidth": 3 if index == 0 else 1.8,
                "marker": _MARKERS[index % len(_MARKERS)],
            }
            axes.plot((1, most + 1), sizes, markevery=[1], label=f"{lever.name}: {most:,}", **style)
        axes.axhline(budget, color="black", linewidth=1)
        axes.annotate(
            f"budget {budget:.1f} GiB",
            (1, budget),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 10),
            textcoords="offset points",
            horizontalalignment="right",
        )
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.15 * budget)
        ranks = f"{base.num_ranks} GPU{'s' * (base.num_ranks > 1)}"
        axes.set_xlabel(f"users at the same time on one replica ({ranks})")
        axes.set_ylabel("KV cache on each GPU [GiB]")
        axes.set_title(
            f"{base.model.name}: contexts of {base.lengths.mean_tokens:,} tokens (mean), {base.kv_format} as given"
        )
        axes.legend(title="lever: users that fit", loc="center left", bbox_to_anchor=(1.01, 0.5))
