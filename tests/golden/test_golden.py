"""Numbers of every method and verb through the public API, as they were recorded: a change in the third digit fails."""

import importlib.util

import pytest

from golden import cases

CASES, NUMBERS = cases.cases(), cases.recorded()


@pytest.mark.parametrize("name", sorted({*CASES, *NUMBERS}))
def test_numbers_are_those_recorded(name: str) -> None:
    if name.startswith("corrupt/frost") and importlib.util.find_spec("imagecorruptions") is None:
        pytest.skip("the frost pictures come with the wheel imagecorruptions, which is not installed")
    if name.startswith(("corrupt/frost", "corrupt/jpeg")):
        pytest.importorskip("PIL", reason="frost and JPEG need Pillow")
    assert name in CASES, f"{name} is in {cases.FILE.name}, and no longer a case: a method or a variant has gone"
    assert name in NUMBERS, f"{name} has no numbers in {cases.FILE.name}: python -m golden.cases --write"
    found = cases.differences(cases.run(CASES[name]), NUMBERS[name])
    assert not found, f"{name}: " + "; ".join(found)


def test_a_change_in_the_third_digit_is_a_difference() -> None:
    assert cases.differences({"a": 1.0005, "b": 1e-7, "c": "x"}, {"a": 1.0, "b": 0.0, "c": "x"}) == []
    found = cases.differences({"a": 1.002, "c": "y", "d": 1.0}, {"a": 1.0, "b": 2.0, "c": "x"})
    assert found == [
        "a: found 1.002, expected 1.0",
        "b: found nothing, expected 2.0",
        "c: found y, expected x",
        "d: found 1.0, expected nothing",
    ]
