"""A stream of a network that is off would train the source's own weights: it is refused."""

import pytest

import undrift
from stream_support import batches, model_of
from support import same, snapshot


def test_no_stream_is_made_while_the_perturbation_is_off() -> None:
    model = model_of()
    with model.off() as net:
        before = snapshot(net)
        with pytest.raises(undrift.UndriftError, match=r"is off; .* outside of model\.off\(\)"):
            undrift.stream(model, batches(1))
        assert same(snapshot(net), before)
    assert len(list(undrift.stream(model, batches(1)))) == 1


def test_no_step_is_made_while_the_perturbation_is_off() -> None:
    model = model_of()
    stream = undrift.stream(model, iter(batches(3)))
    next(stream)
    with model.off() as net:
        before = snapshot(net)
        with pytest.raises(undrift.UndriftError, match="is off"):
            next(stream)
        assert same(snapshot(net), before)
    # No batch was taken for it.
    assert len(list(stream)) == 2
    assert stream.report.batches == 3


def test_a_stream_ends_with_its_perturbation() -> None:
    model = model_of()
    stream = undrift.stream(model, batches(2))
    model.remove()
    with pytest.raises(undrift.UndriftError, match=r"was removed; .* Perturb the network again"):
        next(stream)
