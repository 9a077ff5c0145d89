"""The answers as tables on standard output.

Owns their wording. Prints what `summary` says and computes nothing.
"""

from typing import Any

from kvblocks.report import format_bytes, print_table, write_line


def print_summary(summary: dict[str, Any]) -> None:
    """Print all tables, from what a model caches to what would change the number of users."""
    _print_cache(summary)
    _print_budget(summary)
    if summary["budget"]["short_by_bytes"]:
        return
    _print_users(summary)
    _print_levers(summary)
    _print_readings(summary)


def _print_cache(summary: dict[str, Any]) -> None:
    model, cache, gpus = summary["model"], summary["cache"], summary["gpus"]
    rows = []
    for item in cache["caches"]:
        per_token = "bytes_per_token" in item
        span = item.get("span_tokens")
        rows.append(
            [
                item["kind"],
                str(item["num_layers"]),
                item["formula"],
                _number(item["bytes_per_token"]) if per_token else "-",
                "all" if per_token and span is None else f"{span:,}" if per_token else "-",
                "-" if per_token else f"{item['bytes_per_sequence']:,}",
            ]
        )
    note = f"Sum: {_number(cache['bytes_per_token'])} B/token"
    if cache["bytes_per_token_beyond_windows"] != cache["bytes_per_token"]:
        note += f", {_number(cache['bytes_per_token_beyond_windows'])} B/token beyond all windows"
    if cache["bytes_per_sequence"]:
        note += f", {format_bytes(cache['bytes_per_sequence'])} for each sequence whatever its length"
    if model["num_layers_with_cache"] < model["num_layers"]:
        note += f"; {model['num_layers'] - model['num_layers_with_cache']} layers own none"
    if model["assumed"]:
        pairs = ", ".join(f"{name} {value}" for name, value in model["assumed"].items())
        note += f". Not in the configuration, so its model type's default: {pairs}"
    print_table(
        f"{model['name']}: {model['model_type']}, {model['num_layers']} layers, {model['attention']}; "
        f"cache {cache['kv_format']}, on each of {gpus['num_ranks']} GPU{'s' * (gpus['num_ranks'] > 1)}",
        [
            "layers that own a cache",
            "number",
            "bytes",
            "per token\n[B]",
            "looks back\n[tokens]",
            "per sequence\n[B]",
        ],
        rows,
        note=note + ".",
    )


def _print_budget(summary: dict[str, Any]) -> None:
    budget, gpus = summary["budget"], summary["gpus"]
    utilisation = f"{100 * budget['utilisation']:g} % of {format_bytes(budget['total_bytes'])}"
    if budget["free_bytes"] is not None:
        utilisation += f", at most the {format_bytes(budget['free_bytes'])} free at start"
    share = f"{format_bytes(budget['weights_total_bytes'])} / {gpus['num_ranks']} GPUs, "
    rows = [
        ["usable", utilisation, f"{budget['usable_bytes']:,}", format_bytes(budget["usable_bytes"])],
        [
            "- weights",
            (share if gpus["num_ranks"] > 1 else "") + budget["weights_source"],
            *_size(budget["weights_bytes"]),
        ],
        *(
            [
                f"- {name}",
                f"--{name}" + (", assumed: measure it" if name in budget["assumed"] else ""),
                *_size(budget[f"{name}_bytes"]),
            ]
            for name in ("activations", "graphs", "safety")
        ),
        ["= cache", "", *_size(budget["cache_bytes"])],
    ]
    name = f" ({gpus['name']})" if gpus["name"] else ""
    print_table(f"Budget of one GPU{name}", ["term", "from", "bytes", "size"], rows, num_left=2)
    if budget["short_by_bytes"]:
        write_line(
            f"Nothing fits: weights and reserves exceed what is usable; short by "
            f"{format_bytes(budget['short_by_bytes'])} ({budget['short_by_bytes']:,} bytes) on each GPU."
        )


def _print_users(summary: dict[str, Any]) -> None:
    gpus, cache, lengths = summary["gpus"], summary["cache"], summary["lengths"]
    priced = any(row["cost_per_user_hour"] is not None for row in summary["users"])
    rows = [
        [
            row["lengths"],
            f"{row['context_tokens']:,}",
            " + ".join(f"{blocks:,}" for blocks in row["blocks_per_user"]) or "-",
            format_bytes(row["bytes_per_user"]),
            format_bytes(row["own_bytes_per_user"]),
            f"{row['users']:,}",
            *(["-" if row["cost_per_user_hour"] is None else f"{row['cost_per_user_hour']:.4g}"] * priced),
        ]
        for row in summary["users"]
    ]
    pools = " + ".join(
        f"{pool['num_blocks']:,} blocks of {format_bytes(pool['bytes_per_block'])}"
        for pool in summary["pools"]
    )
    note = "users = (cache - null block of each pool - shared blocks) / own bytes, rounded down"
    note += f", times {gpus['num_replicas']} replicas" if gpus["num_replicas"] > 1 else ""
    note += f". num_blocks: {pools}." if pools else "."
    if lengths["shared_prefix_tokens"]:
        note += f" {lengths['shared_prefix_tokens']:,} tokens are shared by all."
    print_table(
        f"Users at the same time on {gpus['num_gpus']} GPU{'s' * (gpus['num_gpus'] > 1)}, blocks of "
        f"{cache['block_size_tokens']} tokens ({lengths['source']})",
        [
            "context",
            "length\n[tokens]",
            "blocks\nper user",
            "per user\non each GPU",
            "of these own\n(not shared)",
            "users",
        ]
        + ["cost per user\n[per hour]"] * priced,
        rows,
        note=note,
    )
    if len(summary["users"]) > 1:
        write_line(
            f"With lengths independent of one another, {summary['users_fit_99_percent_of_the_time']:,} users fit "
            f"99 % of the time; the users at the mean fit about half of the time."
        )
    longest, limit = summary["users"][0]["context_tokens"], summary["model"]["max_context_tokens"]
    if limit is not None and longest > limit:
        write_line(f"The full context is beyond the model's own limit of {limit:,} tokens.")
    target = summary["target"]
    if target is not None:
        context = target["context_tokens"]
        fits = (
            "any context"
            if context is None
            else f"{context:,} tokens each"
            if context
            else "no context at all"
        )
        verdict = (
            "that, too, fits"
            if target["fits_at_full"]
            else f"short by {format_bytes(target['short_by_bytes'])} a GPU"
        )
        if not target["fits_at_full"] and target["gpus_for_full"] is not None:
            verdict += f", {target['gpus_for_full']:,} such GPUs hold them"
        write_line(f"{target['users']:,} users: {fits} fits; at the full context: {verdict}.")
    beyond = summary["context_beyond_weights_tokens"]
    write_line(
        "One user's cache never outgrows the weights."
        if beyond is None
        else f"One user's cache outgrows the weights from {beyond:,} tokens on."
    )


def _print_levers(summary: dict[str, Any]) -> None:
    headers = {"full": "users\nat full", "p95": "at p95", "mean": "at mean"}
    names = [row["lengths"] for row in summary["users"]]
    last = f"users_at_{names[-1]}"
    base = summary["levers"][0][last]
    rows = [
        [
            row["lever"],
            _number(row["bytes_per_token"]),
            format_bytes(row["bytes_per_user_at_full"]),
            *(f"{row[f'users_at_{name}']:,}" for name in names),
            f"{row[last] / base:.2f}" if base else "-",
        ]
        for row in summary["levers"]
    ]
    write_line()
    print_table(
        "Levers, one at a time",
        [
            "lever",
            "per token\n[B]",
            "own, per user\nat full",
            *(headers[name] for name in names),
            "ratio to\nas given",
        ],
        rows,
    )


def _print_readings(summary: dict[str, Any]) -> None:
    if summary["readings"]:
        print_table(
            "The same card in other arithmetic: (memory - weights) / one user at full, no reserves",
            ["reading", "users"],
            [[row["reading"], f"{row['users']:,}"] for row in summary["readings"]],
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _size(num_bytes: int) -> list[str]:
    return [f"{num_bytes:,}", format_bytes(num_bytes)]
