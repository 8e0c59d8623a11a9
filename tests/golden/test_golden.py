"""Numbers of every method and verb through the public API, as they were recorded: a change in the third digit fails."""

import importlib.util
import re

import pytest

import undrift
from golden import cases

CASES, NUMBERS = cases.cases(), cases.recorded()


# Authors' values for another benchmark run the same code with other numbers; VMP as released runs other code.
OTHER_VALUES = re.compile(":(?!released|paper)")
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if OTHER_VALUES.search(name) else [])
    for name in sorted({*CASES, *NUMBERS})
]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_recorded(name: str) -> None:
    if name.startswith("corrupt/frost") and importlib.util.find_spec("imagecorruptions") is None:
        pytest.skip("the frost pictures come with the wheel imagecorruptions, which is not installed")
    if name.startswith(("corrupt/frost", "corrupt/jpeg")):
        pytest.importorskip("PIL", reason="frost and JPEG need Pillow")
    assert name in CASES, f"{name} is in {cases.FILE.name}, and no longer a case: a method or a variant has gone"
    assert name in NUMBERS, f"{name} has no numbers in {cases.FILE.name}: python -m golden.cases --write"
    found = cases.differences(cases.run(CASES[name]), NUMBERS[name])
    assert not found, f"{name}: " + "; ".join(found)


def test_a_change_in_the_third_digit_is_a_difference_in_every_case() -> None:
    for name, numbers in NUMBERS.items():
        given = {key: value for key, value in numbers.items() if not isinstance(value, str) and value}
        found = cases.differences({key: 1.005 * value for key, value in given.items()}, given)
        assert len(found) >= 0.7 * len(given) > 0, name  # the rest is below 2e-4, near rounding


def test_methods_and_loops_all_have_a_case() -> None:
    told = {(loop, name) for name, method in undrift.methods.METHODS.items() for loop in method.loops}
    assert told <= {(name.split("/")[0], re.split("[/:]", name)[1]) for name in NUMBERS if "/" in name}


def test_a_change_in_the_third_digit_is_a_difference() -> None:
    assert cases.differences({"a": 1.0005, "b": 1e-7, "c": "x"}, {"a": 1.0, "b": 0.0, "c": "x"}) == []
    found = cases.differences({"a": 1.002, "c": "y", "d": 1.0}, {"a": 1.0, "b": 2.0, "c": "x"})
    assert found == [
        "a: found 1.002, expected 1.0",
        "b: found nothing, expected 2.0",
        "c: found y, expected x",
        "d: found 1.0, expected nothing",
    ]
