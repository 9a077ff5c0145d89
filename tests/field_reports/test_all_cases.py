"""Every case of the areas that the block manager has to bear stands as a test that has its number."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    "A, accounting": "P001 P002 P003 P004 P005 P008 P009 P010 P011 P012 P015",
    "B, fork": "P016 P017 P019 P020",
    "C, prefix cache": "P022 P023 P024 P025 P026 P029 P030 P031 P032 P033 P034 P038",
    "D, hashing": "P039 P040 P041 P042 P043 P044 P046 P047 P048",
    "E, boundaries": "P049 P051 P052 P054 P055",
    "F, windows": "P062",
    "G, speculation": "P065 P066 P068",
    "H, admission": "P069 P071 P073 P074 P075",
    "I, metrics": "P078 P080 P081",
    "J, eviction": "P082 P083 P084",
    "L, cost": "P090 P091 P092",
    "M, FP8": "P093 P094 P096 P098 P099 P100 P102",
    "N, INT8 and fewer bits": "P104 P105 P106 P108",
    "O, attention": "P111 P112 P113 P114 P115 P116 P117 P118 P119 P122 P123",
    "Q, GPU": "P130 P133 P136",
    "R, binding": "P140",
    "S, benchmarks": "P141 P142",
}


# Cases that suites of their own bear, by the tests that do.
ELSEWHERE = {
    "P095": (
        "conformance/test_quantize.py",
        "test_edges_of_e4m3_and_e5m2",
        "test_every_16_bit_value_becomes_the_code_of_the_reference",
    ),
    "P097": (
        "kernels/test_attention.py",
        "test_equal_weights_of_131072_keys",
        "test_one_key_among_131072_that_counts",
    ),
    "P125": ("gpu/test_steps.py", "test_each_consumer_sees_its_own_step"),
    "P131": ("gpu/test_cupy.py", "test_every_launch_goes_to_the_current_stream"),
    "P132": ("gpu/test_libraries.py", "test_a_call_waits_for_the_stream_that_an_arrays_owner_names"),
    "P134": ("gpu/test_cubins.py", "test_a_second_process_compiles_nothing"),
}


def numbers_of_tests() -> set[str]:
    """The cases that tests name: `test_p001_..` in Python, `fn p001_..` in Rust."""
    files = [*ROOT.glob("tests/field_reports/test_area_*.py"), *ROOT.glob("rust/kvblocks-core/tests/*.rs")]
    assert len(files) >= len(CASES) + 3
    texts = "\n".join(path.read_text() for path in files)
    return {
        f"P{number}" for number in re.findall(r"^(?:def test|#\[test\]\nfn )_?p(\d{3})_", texts, re.MULTILINE)
    }


def test_each_case_has_its_test() -> None:
    wanted = " ".join(CASES.values()).split()
    assert len(wanted) == len(set(wanted)) == 87
    assert sorted(set(wanted) - numbers_of_tests()) == []


def test_the_tests_of_other_suites_stand() -> None:
    assert not set(ELSEWHERE) & set(" ".join(CASES.values()).split())
    for file, *names in ELSEWHERE.values():
        text = (ROOT / "tests" / file).read_text()
        for name in names:
            assert f"def {name}(" in text, f"{file} has no {name}"
