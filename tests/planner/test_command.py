"""`kvblocks plan` as it is called: its example, its outputs, and input that it cannot use."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from kvblocks.cli import main
from kvblocks.planner.command import EXAMPLE
from kvblocks.planner.models import BUILT_IN

LLAMA = "llama-2-7b --memory 80GB --utilisation 1 --weights 14GB --activations 0 --graphs 0"


def plan(arguments: str) -> int:
    return main(["plan", *arguments.split()])


def answer(arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON that a call prints."""
    assert plan(f"{arguments} --json -") in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_the_example_of_the_help_works_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        plan("--help")
    assert exit_.value.code == 0
    assert f"example:\n  {EXAMPLE}\n" in capsys.readouterr().out
    program, *arguments = EXAMPLE.split()
    assert program == "kvblocks"
    assert main(arguments) == 1  # 64 users do not fit at the full context
    printed = capsys.readouterr().out
    assert "32 x (128 x 2 B + 128 x 2 B) x 8 heads" in printed
    assert "Budget of one GPU (H100-80GB)" in printed
    assert "64 users: 6,992 tokens each fits; at the full context: short by" in printed
    assert "2 bit: kivi2, blocks of 32" in printed


def test_the_answer_of_the_known_case(capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(f"{LLAMA} --price-per-hour 3 --users 31", capsys)
    assert value["cache"]["bytes_per_token"] == 524_288
    assert value["budget"]["cache_bytes"] == 66 * 10**9
    assert value["users"] == [
        {
            "lengths": "full",
            "context_tokens": 4096,
            "blocks_per_user": [256],
            "bytes_per_user": 2 << 30,
            "own_bytes_per_user": 2 << 30,
            "users": 30,
            "cost_per_user_hour": 0.1,
        }
    ]
    assert value["target"]["fits_at_full"] is False
    assert value["target"]["short_by_bytes"] == 31 * (2 << 30) + (8 << 20) - 66 * 10**9
    assert value["pools"][0]["num_blocks"] == 66 * 10**9 // (8 << 20)
    assert [row["users"] for row in value["readings"]] == [33, 30, 33, 27, 29]
    users = {row["lever"]: row["users_at_full"] for row in value["levers"]}
    assert users["half the context"] == 61
    assert users["8 bit: fp8_e4m3:tensor"] == 61
    assert users["contiguous at the maximum, not paged"] == 30


def test_paging_pays_where_contexts_are_shorter_than_the_longest(capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(f"{LLAMA} --p50 500 --p95 2000 --growth 2", capsys)
    lengths = {row["lengths"]: row["context_tokens"] for row in value["users"]}
    assert lengths == {"full": 4096, "p95": 2000, "mean": 704}
    levers = {row["lever"]: row["users_at_mean"] for row in value["levers"]}
    assert levers["as given"] == 66 * 10**9 // (8 << 20) // 44
    assert levers["contiguous at the maximum, not paged"] == 30
    assert levers["context x 2"] == pytest.approx(levers["as given"] / 2, abs=2)


def test_replicas_add_up_and_ranks_share(capsys: pytest.CaptureFixture[str]) -> None:
    one = answer(LLAMA, capsys)
    assert answer(f"{LLAMA} --gpus 3", capsys)["users"][0]["users"] == 3 * one["users"][0]["users"]
    two = answer(f"{LLAMA} --tp 2", capsys)
    assert two["cache"]["bytes_per_token"] == one["cache"]["bytes_per_token"] / 2
    assert two["budget"]["weights_bytes"] == 7 * 10**9


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    assert plan(f"llama-3-8b --gpu L40S --plot {tmp_path / 'users.png'}") == 0
    assert (tmp_path / "users.png").read_bytes().startswith(b"\x89PNG")


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--list") == 0
    printed = capsys.readouterr().out
    for name in (*BUILT_IN, "H200", "143,771", "kivi2", "deepseek_v32"):
        assert name.replace("143,771", "140.40 GiB") in printed


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_model_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ("", "--kv-format int8 --p50 100 --p95 300 --tp 2 --gpus 4"):
        if name in ("falcon-7b", "smollm2-135m"):
            options = options.replace("--tp 2", "")  # 71 and 9 query heads
        assert plan(f"{name} --gpu MI300X --weights 20GB {options} --context 2000") == 0
        assert "Levers, one at a time" in capsys.readouterr().out


# --- files


def folder(path: Path, config: object, **files: bytes) -> Path:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def safetensors(num_bytes: int, *, end: int | None = None) -> bytes:
    header = {
        "a": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes if end is None else end]}
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def test_a_folder_gives_configuration_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(
        tmp_path,
        BUILT_IN["llama-3-8b"],
        model__safetensors=safetensors(1000),
        more__safetensors=safetensors(5),
    )
    options = "--memory 80GiB"
    assert answer(f"{path} {options}", capsys)["budget"]["weights_total_bytes"] == 1005
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16_060_522_496.0}, "weight_map": {}}))
    assert answer(f"{path} {options}", capsys)["budget"]["weights_total_bytes"] == 16_060_522_496
    assert answer(f"{path}/config.json {options}", capsys)["budget"]["weights_total_bytes"] == 16_060_522_496
    assert (
        answer(f"llama-3-8b {options} --weights {index}", capsys)["users"]
        == answer(f"{path} {options}", capsys)["users"]
    )
    assert answer(f"{path} {options} --weights 2GB", capsys)["budget"]["weights_total_bytes"] == 2 * 10**9
    counted = answer(f"llama-3-8b {options} --params 8B --weights-dtype int4", capsys)
    assert counted["budget"]["weights_total_bytes"] == 4 * 10**9


def test_a_configuration_may_begin_with_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(BUILT_IN["llama-3-8b"]).replace(",", ",\r\n")
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert answer(f"{tmp_path} --gpu H200", capsys)["cache"]["bytes_per_token"] == 131_072


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("", "config.json: line 1: expected JSON"),
        ('{"model_type": "llama",\n "num_hidden_layers": }', "config.json: line 2: expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[1, 2]", "config.json: found [1, 2]: expected an object with the fields of a model"),
        ({"model_type": "squid"}, "model_type 'squid' is not known, so its cache is not guessed. Looked for:"),
        ({"model_type": 3}, "no field model_type"),
        ({"model_type": "llama"}, "no field num_hidden_layers"),
        (BUILT_IN["llama-3-8b"] | {"num_key_value_heads": 7}, "num_key_value_heads is 7: expected a divisor of 32"),
        (BUILT_IN["llama-3-8b"] | {"head_dim": -1}, "is -1: expected an integer >= 1"),
        (BUILT_IN["llama-3-8b"] | {"hidden_size": 4097}, "hidden size 4097 does not divide by 32 heads"),
        (BUILT_IN["llama-3-8b"] | {"layer_types": ["full_attention"]}, "layer_types has 1 items: expected one for"),
        (BUILT_IN["llama-3-8b"] | {"layer_types": ["wavy"] * 32}, "layer 0 is 'wavy': expected one of"),
        (BUILT_IN["llama-3-8b"] | {"layer_types": 3}, "layer_types is 3: expected a list of str"),
        (BUILT_IN["llama-3-8b"] | {"torch_dtype": "int3"}, "torch_dtype is 'int3': expected one of float32"),
        (BUILT_IN["gemma-3n-e4b"] | {"num_kv_shared_layers": 35}, "expected fewer than the 35 layers"),
        (BUILT_IN["qwen2.5-7b"] | {"use_sliding_window": "no"}, "use_sliding_window is 'no': expected true or false"),
    ],
)  # fmt: skip
def test_a_bad_configuration_names_file_field_and_what_was_expected(
    config: object, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, config)
    assert plan(f"{path} --memory 80GiB --weights 1GB") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith(f"kvblocks: {path}")
    assert problem in captured.err


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model.safetensors.index.json", b"{}", "metadata.total_size is None: expected bytes"),
        ("model.safetensors.index.json", b'{"metadata": {"total_size": -4}}', "is -4: expected bytes"),
        ("model.safetensors.index.json", b"\xff", "byte 0: expected UTF-8"),
        ("a.safetensors", b"", "header of 0 bytes in a file of 0: expected safetensors"),
        ("a.safetensors", struct.pack("<Q", 4) + b"{}{}", "expected a safetensors header"),
        ("a.safetensors", safetensors(10, end=20), "tensors end at byte 20, the file has 10: truncated?"),
    ],
)
def test_bad_weights_name_the_file(
    name: str, content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, BUILT_IN["llama-3-8b"])
    (path / name).write_bytes(content)
    assert plan(f"{path} --memory 80GiB") == 2
    error = capsys.readouterr().err
    assert name in error
    assert problem in error


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "no model: expected a config.json"),
        ("llama-9 --gpu H200", "llama-9: no such file, and not one of the built-in models: command-r-35b"),
        ("llama-3-8b", "expected one of --gpu NAME (see --list) and --memory SIZE"),
        ("llama-3-8b --gpu H200 --memory 1GiB", "expected one of --gpu NAME"),
        ("llama-3-8b --gpu Z80", "--gpu Z80: expected one of T4"),
        ("llama-3-8b --gpu H200 --weights 3parsecs", "--weights 3parsecs: no such file, and not a size"),
        ("llama-3-8b --gpu H200 --kv-format int3", "--kv-format int3: k_format is 'int3'"),
        (
            "llama-3-8b --gpu H200 --kv-format kivi2",
            "block_size is 16: k_format kivi2 needs a multiple of 32",
        ),
        ("llama-3-8b --gpu H200 --p50 10", "--p50 and --p95 belong together"),
        ("llama-3-8b --gpu H200 --p50 10 --p95 5", "p50 is 10, p95 5: expected 1 <= p50 <= p95"),
        ("llama-3-8b --gpu H200 --tp 3", "--tp 3: 32 query heads do not divide evenly"),
        ("llama-3-8b --gpu H200 --tp 2 --gpus 3", "--gpus 3: expected a multiple of --tp 2"),
        ("mamba-2.8b --gpu H200 --weights 1GB", "no field max_position_embeddings: --context TOKENS"),
        ("jamba-v0.1 --gpu H200", "no rule counts the parameters of model_type 'jamba'"),
        ("gpt-oss-20b --gpu H200", "its weights are quantised (mxfp4)"),
        ("llama-3-8b --gpu H200 --set x", "--set x: expected FIELD=VALUE"),
        ("llama-3-8b --gpu H200 --as squid", "model_type 'squid' is not known"),
        ("llama-3-8b --gpu H200 --plot users.gif", "users.gif: expected a name that ends in .png"),
        ("llama-3-8b --gpu H200 --json no/such/folder.json", "no/such/folder.json: cannot write"),
    ],
)
def test_bad_options_name_the_option(
    arguments: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(arguments) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--memory 5", "--memory -1GiB", "--tp 0", "--tp x", "--utilisation 0", "--utilisation 1.1", "--utilisation nan",
     "--context -5", "--users 0", "--block-size 0", "--params 7X", "--growth 0", "--shared-prefix -1",
     "--price-per-hour free", "--weights-dtype int3"],
)  # fmt: skip
def test_a_number_that_is_none_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        plan(f"llama-3-8b --gpu H200 {option}")
    assert exit_.value.code == 2
    assert option.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_fields_are_overridden_and_types_borrowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "squid", "text_config": BUILT_IN["llama-3-8b"] | {"model_type": "squid_text"}}
    path = folder(tmp_path, config)
    options = f"{path} --gpu H200 --as llama --weights 16GB"
    assert answer(options, capsys)["cache"]["bytes_per_token"] == 131_072
    assert answer(f"{options} --set num_kv_shared_layers=16", capsys)["cache"]["bytes_per_token"] == 65_536
    windowed = answer("mistral-7b-v0.1 --gpu H200 --set sliding_window=null", capsys)
    assert windowed["cache"]["bytes_per_token_beyond_windows"] == 131_072


def test_json_needs_no_tools_and_tables_name_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rich.table", "rich.text", "rich.console", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    assert answer(LLAMA, capsys)["users"][0]["users"] == 30
    assert plan(LLAMA) == 2
    assert "pip install 'kvblocks[tools]'" in capsys.readouterr().err


def test_a_context_beyond_the_models_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{LLAMA} --context 5000") == 0
    assert "beyond the model's own limit of 4,096 tokens" in capsys.readouterr().out
    assert plan(LLAMA) == 0
    assert "limit" not in capsys.readouterr().out


def test_a_trace_says_how_long_contexts_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "arrival,input_tokens,output_tokens",
        *(f"{i},{100 * i},1" for i in range(1, 101)),
        "101,many,1",
        "102,5,0",
    ]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(lines))
    assert plan(f"{LLAMA} --trace {path} --json -") == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    lengths = {row["lengths"]: row["context_tokens"] for row in value["users"]}
    assert lengths == {"full": 4096, "p95": 4096, "mean": 3278}
    assert (
        "100 requests of requests.csv, 60 cut at the full context, 1 broken lines"
        in value["lengths"]["source"]
    )
    assert "requests.csv:102" in captured.err
    path.write_text("nothing\n")
    assert plan(f"{LLAMA} --trace {path}") == 2
    assert str(path) in capsys.readouterr().err
    assert plan(f"{LLAMA} --trace {path} --p50 3 --p95 4") == 2
    assert "exclude one another" in capsys.readouterr().err


def test_what_nobody_gave_is_said_to_be_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-2-7b", "--memory", "80GB", "--graphs", "0"]) == 0
    printed = capsys.readouterr().out
    assert "--activations, assumed: measure it" in printed
    assert printed.count("assumed") == 1


@pytest.mark.parametrize("digits", ["1" + 5000 * "0", "-" + 5000 * "7"])
def test_a_number_of_thousands_of_digits_is_no_traceback(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"model_type": "llama", "num_hidden_layers": {digits}}}')
    assert main(["plan", str(path), "--memory", "80GB"]) == 2
    assert f"{path}: expected JSON with shorter numbers" in capsys.readouterr().err
    assert main(["plan", "llama-2-7b", "--memory", "80GB", "--set", f"num_hidden_layers={digits}"]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err


def test_a_plot_of_nothing_is_said_not_to_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "users.png"
    assert main(["plan", "llama-2-7b", "--memory", "10GB", "--plot", str(plot), "--json", "-"]) == 1
    assert f"{plot}: not drawn, as nothing fits" in capsys.readouterr().err
    assert not plot.exists()
