"""Noise at the price of reading a tensor: the energy of a layer's input, and noise added to its output.

    plane[n, g, p] = Σ_{window(p)} Σ_{c in g} x²[n, c, ·]        `square_sum`, then a box filter
    out[n, o, p]   = y[n, o, p] + σ[o] · √plane[n, g(o), p] · ε  `add_noise`

ε is a function of a key and of a position (`epsilon`), so that the backward pass draws it again instead of keeping it.
`plain` says all of it in PyTorch's own operators and is what everything else is tested against; `kernels`
(and `kernels_grouped`, `kernels_keys`) are Triton's, `trial` finds out whether they run, `launch` calls them, `layer`
makes one node of autograd of a whole layer, by the fewer and larger `kernels_layer` that `folded` calls where they pay,
with the layer's `own` gradient in it, and what was `known` of the layer a pass ago is not looked up again; `native` is
all of that for such a layer, without Python;
`cpu` works in pieces that stay in a core's cache; `operators` and `traced`
register the functions with torch.library, with the `gradients` that both have, and in a graph that holds the KL too,
all log-variances are `shared`.
"""

from undrift.kernels.dispatch import add_noise, force, narrowed, quick, share, square_sum
from undrift.kernels.epsilon import normal

__all__ = ["add_noise", "force", "narrowed", "normal", "quick", "share", "square_sum"]
