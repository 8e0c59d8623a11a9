"""The energy of a layer's input, and noise added to its output, in little more time than reading the tensors.

    plane[n, g, p] = Σ_{window(p)} Σ_{c in g} x²[n, c, ·]        `square_sum`, then a box filter
    out[n, o, p]   = y[n, o, p] + σ[o] · √plane[n, g(o), p] · ε  `add_noise`

ε is a function of a key and of a position (`normal`), so that a backward pass can draw it again instead of keeping it.
`add_layer_noise` does both lines, in one autograd node if that is faster; `keys` makes a step's keys.

There are three implementations. `reference` uses PyTorch's own operators; the others are tested against it. `cpu` works
in pieces that stay in a core's cache. `triton` has the kernels: `layer` and `eager` launch them from uncompiled code,
`traced` and `shared` register them with torch.library for compiled graphs. `choice.choose` picks one.
"""

from undrift.kernels.choice import force
from undrift.kernels.dispatch import add_layer_noise, add_noise, keys, narrowed, share, square_sum
from undrift.kernels.epsilon import normal

__all__ = ["add_layer_noise", "add_noise", "force", "keys", "narrowed", "normal", "share", "square_sum"]
