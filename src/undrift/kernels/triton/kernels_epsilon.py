"""ε and σ for Triton's kernels: the function of undrift.kernels.epsilon, a few instructions a number.

Imported on a CUDA machine only, or for Triton's interpreter.
"""

# mypy: ignore-errors
# Triton compiles these functions itself: they are not typed Python.

import math
import os

import torch
import triton
import triton.language as tl

from undrift.kernels.epsilon import BITS, COLUMN, COSINE, JOINED, ROOT, ROW, SINE

_S0, _S1, _S2, _S3 = (tl.constexpr(s) for s in COLUMN.shifts)
_F0, _F1, _F2 = (tl.constexpr(f) for f in COLUMN.factors)
_R0, _R1 = (tl.constexpr(s) for s in ROW.shifts)
_G0, _G1 = (tl.constexpr(f) for f in ROW.factors)
_J0, _H0, _H1 = (tl.constexpr(c) for c in (*JOINED.shifts, *JOINED.factors))
_P0, _P1, _P2, _P3, _P4 = (tl.constexpr(c) for c in SINE)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5 = (tl.constexpr(c) for c in COSINE)
_OTHER = tl.constexpr(32 - BITS)
_TURN, _TWO_LN_TWO = (tl.constexpr(c) for c in (2 * math.pi, ROOT**2))
# NVIDIA's own instructions; neither AMD's compiler nor Triton's interpreter knows them.
_FAST = tl.constexpr(torch.version.cuda is not None and os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def _radius(u, plane):
    """Return √(−log₂ u · plane) for u in (0, 1), to 2^-22: Triton's own take twenty instructions for the last bits.

    NVIDIA's sines do not hold Box-Muller's √(2 ln 2), as our polynomials do: there it is in the radius.
    """
    if _FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.ftz.f32 t, $1; mul.ftz.f32 t, t, $2; sqrt.approx.ftz.f32 $0, t; }",
            "=f,f,f", [u, -_TWO_LN_TWO * plane], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.sqrt(plane) * tl.sqrt(-tl.log2(u))


@triton.jit
def _lower(word):
    """Return the float in [1, 2) whose fraction is the word's lower bits: a conversion would take longer."""
    if _FAST:  # and-or at once
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x7FFFFF, 0x3F800000, 0xEA;", "=r,r", [word], tl.int32, is_pure=True, pack=1
        )
        return bits.to(tl.float32, bitcast=True)
    return ((word & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _upper(word):
    """Return the float in [1, 2) whose fraction is the word's upper bits."""
    if _FAST:  # what is shifted in from above are the bits of 1.0
        bits = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, 0x7F, 9;", "=r,r", [word], tl.int32, is_pure=True, pack=1
        )
        return bits.to(tl.float32, bitcast=True)
    return ((word >> _OTHER) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def sigma(log_var):
    """Return exp(log_var / 2)."""
    log_two = 0.7213475204444817 * log_var.to(tl.float32)
    if _FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [log_two], tl.float32, True, 1)
    return tl.exp2(log_two)


@triton.jit
def sigmas(log_var_ptr, c, half):
    """Return σ of channels of the first half, and of the same ones of the second."""
    first = sigma(tl.load(log_var_ptr + c, mask=c < half, other=0.0))
    return first, sigma(tl.load(log_var_ptr + half + c, mask=c < half, other=0.0))


@triton.jit
def polar(word, plane):
    """Return √plane·r, and the sine and cosine that make it √plane·ε twice, for a row's word and a column's.

    `pair` of undrift.kernels.epsilon; the words are joined by exclusive or.
    """
    z = word * _H0
    z = (z ^ (z >> _J0)) * _H1
    radius = _radius(_lower(z) - 0.999999940395355224609375, plane)
    if _FAST:  # two instructions on a unit of their own, where the polynomials take twelve of the one that all wait for
        theta = _upper(z) * _TURN - 1.5 * _TURN
        sine = tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [theta], tl.float32, True, 1)
        cosine = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [theta], tl.float32, True, 1)
    else:
        angle = _upper(z) * 2.0 - 3.0
        square = angle * angle
        sine = ((((_P4 * square + _P3) * square + _P2) * square + _P1) * square + _P0) * angle
        cosine = ((((_Q5 * square + _Q4) * square + _Q3) * square + _Q2) * square + _Q1) * square + _Q0
    return radius, sine, cosine


@triton.jit
def pair(word, plane):
    """Return √plane·ε twice."""
    radius, sine, cosine = polar(word, plane)
    return radius * sine, radius * cosine


@triton.jit
def words(key_ptr):
    """Return the key's lower and upper word."""
    key = tl.load(key_ptr)
    return (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def row_words(row, low, high):
    """Return the words of rows (`rows` of undrift.kernels.epsilon)."""
    z = (row.to(tl.uint32) + low) * _G0
    z = (z ^ (z >> _R0)) * _G1 + high
    return z ^ (z >> _R1)


@triton.jit
def column_words(column, low, high):
    """Return the words of columns (`columns` of undrift.kernels.epsilon)."""
    z = column.to(tl.uint32) + high
    z = (z ^ (z >> _S0)) * _F0 + low
    z = (z ^ (z >> _S1)) * _F1
    z = (z ^ (z >> _S2)) * _F2
    return z ^ (z >> _S3)
