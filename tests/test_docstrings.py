"""Every example in a docstring runs and prints what it shows."""

import doctest
import importlib
import pkgutil

import pytest

import undrift
import undrift_bench


@pytest.mark.filterwarnings("ignore:.* of neighbouring images:undrift.UndriftWarning")
def test_examples_in_docstrings_print_what_they_show() -> None:
    names = [
        found.name
        for package in (undrift, undrift_bench)
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if "triton" not in found.name and not found.name.endswith("__main__")
    ]
    ran = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert [name for name, outcome in zip(names, ran, strict=True) if outcome.failed] == []
    assert sum(outcome.attempted for outcome in ran) > 100
