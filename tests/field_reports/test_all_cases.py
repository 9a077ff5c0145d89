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
    "R, binding": "P140",
    "S, benchmarks": "P141 P142",
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
    assert len(wanted) == len(set(wanted)) == 62
    assert sorted(set(wanted) - numbers_of_tests()) == []
