"""A compressed shift: by hand on a few numbers, and within its bounds on any."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.packs import shift
from undrift.packs.compression import LowRankShift, at_rate
from undrift.packs.quantized import QuantizedShift, per_byte


def test_signs_by_hand() -> None:
    found = QuantizedShift.of(torch.tensor([[1.0, -3.0, 2.0, -2.0], [0.5, 0.5, 0.5, 0.5]]), levels=2)
    assert found.dense().tolist() == [[2, -2, 2, -2], [0.5, 0.5, 0.5, 0.5]]  # mean |shift| of each kernel
    assert found.digits.tolist() == [0b10101111]
    assert found.nbytes == 1 + 2 * 4


def test_three_levels_by_hand() -> None:
    found = QuantizedShift.of(torch.tensor([[4.0, -2.0, 0.1, 0.0, 3.0]]), levels=3)
    assert found.dense().tolist() == [[3, -3, 0, 0, 3]]  # (4 + 2 + 3) / 3 has the least squares
    assert found.digits.tolist() == [2 * 81 + 0 * 27 + 1 * 9 + 1 * 3 + 2]
    # A dead zone of 0.7 steps swallows the 2, and the others have their own mean.
    assert QuantizedShift.of(torch.tensor([[4.0, -2.0, 0.1, 0.0, 3.0]]), 3, 0.7).dense().tolist() == [
        [3.5, 0, 0, 0, 3.5]
    ]


@pytest.mark.parametrize("levels", [3, 4, 5, 7])
def test_multiples_of_a_step_come_back_exactly(levels: int) -> None:
    multiples = (torch.arange(levels) - (levels - 1) / 2).repeat(2, 9)
    steps = torch.tensor([[0.25], [8.0]])
    torch.testing.assert_close(QuantizedShift.of(multiples * steps, levels).dense(), multiples * steps)


def test_steps_are_given_and_the_shift_keeps_its_length() -> None:
    found = QuantizedShift.at(torch.tensor([[4.0, -2.0, 0.5, 0.25, 3.0, 0.7]]), torch.tensor([1.0]))
    # 0.5 and 0.25 become 0, and 0.7 becomes 1; the step grows to ⟨shift, shift⟩ / ⟨shift, multiples⟩, in bfloat16.
    step = (16 + 4 + 0.25 + 0.0625 + 9 + 0.49) / (16 + 4 + 9 + 0.7)
    torch.testing.assert_close(found.dense(), step * torch.tensor([[4.0, -2, 0, 0, 3, 1]]), rtol=2**-8, atol=0)
    assert found.levels == 9


def test_steps_hold_what_is_large_and_forget_what_never_moved() -> None:
    rows = torch.tensor([[1000.0, 307.0, 11.5], [0.1, 0.0, -0.1], [0.0, 0.0, 0.0]])
    found = QuantizedShift.at(rows, torch.tensor([1.0, 1.0, 0.0]))
    assert found.levels == 255
    torch.testing.assert_close(found.dense()[0], rows[0], rtol=0, atol=7.9)  # less than a step of 1000/127
    assert found.dense()[1:].abs().max() == 0


@pytest.mark.parametrize("bits", [1.0, 1.5, 3.0])
def test_the_rate_holds_whatever_the_distribution(bits: float) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name, (size, tail) in {"a": (1.0, 1), "b": (100.0, 3), "c": (0.01, 1)}.items():
        source = size * torch.randn(128, 64, 3, 3, generator=generator)
        pairs[name] = source, source + 0.01 * size * torch.randn(source.shape, generator=generator) ** tail
    found = at_rate(pairs, bits)
    size = sum(tensor.nbytes for part in found.values() for tensor in part.stored().values())
    weights = sum(source.numel() for source, _ in pairs.values())
    assert 0.9 * bits <= 8 * size / weights <= 1.01 * bits
    for name, (source, adapted) in pairs.items():
        moved, kept = (adapted - source).flatten(), found[name].dense().flatten()
        # In its own direction a shift is whole, however coarse the steps.
        assert abs(float(kept @ moved / moved.square().sum()) - 1) < 0.05, name


def test_a_product_of_two_vectors_has_rank_one() -> None:
    rows, columns = torch.tensor([[1.0], [-2.0], [0.5]]), torch.tensor([[3.0, 0.0, -1.0, 2.0]])
    exact = LowRankShift.from_factors(rows, columns, (3, 2, 2))
    assert torch.equal(exact.dense(), (rows @ columns).view(3, 2, 2))
    found = LowRankShift.of(exact.dense(), rank=1)
    assert (found.rows.dtype, tuple(found.columns.shape)) == (torch.int8, (1, 4))
    assert (found.dense() - exact.dense()).abs().max() <= 6 / 127  # half a step of each factor, at the largest entry
    assert LowRankShift.of(exact.dense(), rank=50).scale.numel() == 3


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(1, 1), (3, 5), (4, 3, 3, 3), (7, 2, 11), (20, 33)]),
    levels=st.sampled_from([2, 3, 4, 5, 7, 15, 16, 255]),
    dead_zone=st.sampled_from([0.5, 0.6, 0.8]),
    scale=st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 1e4]),
    tail=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_stepped_shift_keeps_its_bounds(
    shape: tuple[int, ...], levels: int, dead_zone: float, scale: float, tail: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = scale * torch.randn(shape, generator=generator)
    wanted = wanted**3 if tail else wanted
    found = QuantizedShift.of(wanted, levels, dead_zone)
    error = (found.dense().double() - wanted.double()).flatten(1).norm(dim=1)
    assert (error <= wanted.double().flatten(1).norm(dim=1) * (1 + 1e-5)).all()  # never worse than no shift at all
    assert found.nbytes == math.ceil(wanted.numel() / per_byte(levels)) + 4 * shape[0]
    stored = found.stored()
    assert sum(tensor.nbytes for tensor in stored.values()) <= found.nbytes
    again = shift.read(shift.described(found), stored)
    assert torch.equal(again.dense(), found.dense())
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        source = torch.randn(shape, generator=generator).to(dtype)
        added = again.added_to(source)
        assert (added.dtype, added.shape) == (dtype, source.shape)
        if dtype != torch.float64:
            assert torch.equal(added, (source.float() + found.dense()).to(dtype))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "wavelets"}, "no compression is called 'wavelets'; known: low-rank, stepped, vector"),
        ({"shape": []}, r"a weight of shape \(\)"),
        ({"shape": [2, 0]}, r"a weight of shape \(2, 0\)"),
        ({"shape": [3, 40]}, r"step is torch.float32 \(2,\) instead of torch.float32 \(3,\)"),
        ({"shape": [2, 400]}, "digits"),
        ({"shape": [2, 4]}, "digits do not fit"),
        ({"levels": 1}, "1 levels; needed: 2 to 255"),
        ({"levels": 2}, "digits"),
        ({"base": 7}, "digits of base 7 for 3 levels"),
        ({"levels": 9, "base": 5}, "holds digits, step instead of digits, beyond, step"),
        ({"digits": torch.full((16,), 255, dtype=torch.uint8)}, "digits do not fit"),
        ({"digits": torch.zeros(0, dtype=torch.uint8)}, "digits do not fit"),
        ({"digits": torch.zeros(16)}, "digits is torch.float32"),
        ({"step": torch.tensor([1.0, math.nan])}, "step holds NaN"),
        ({"more": torch.zeros(1)}, "holds digits, more, step instead of digits, step"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, object], match: str) -> None:
    found = QuantizedShift.of(torch.randn(2, 40, generator=torch.Generator().manual_seed(0)), levels=3)
    entry, stored = shift.described(found), {"digits": found.digits, "step": found.step}
    for name, value in change.items():
        (stored if isinstance(value, torch.Tensor) else entry)[name] = value  # type: ignore[index]
    with pytest.raises(ValueError, match=match):
        shift.read(entry, stored)


def test_factors_that_do_not_fit_are_refused() -> None:
    found = LowRankShift.of(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), rank=2)
    entry, stored = shift.described(found), found.stored()
    assert torch.equal(shift.read(entry, stored).dense(), found.dense())
    for broken in (
        {**stored, "rows": stored["rows"][:3]},
        {**stored, "scale": stored["scale"][:1]},
        {**stored, "columns": stored["columns"].float()},
        {"rows": stored["rows"]},
        {},
    ):
        with pytest.raises(ValueError, match="instead of"):
            shift.read(entry, broken)
