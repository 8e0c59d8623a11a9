"""Find the parts of a network that options name by their role.

`@classifier` is the last layer of the module called classifier, fc, head, …, or else the last one registered with a
weight matrix; of a network of convolutions alone the last of them. `@bottleneck` is the module of that name (SHOT's).
Without such a module the pattern matches nothing.
"""

from torch import nn

from undrift.options import Options
from undrift.posterior.select import plain_name

ROLES = ("@classifier", "@bottleneck")
CLASSIFIER_NAMES = ("classifier", "classification_head", "fc", "head", "last", "logits")  # fc2 counts too
OUTERMOST_NAMES = ("out", "output")  # deeper, they are attention's


def resolve_roles(net: nn.Module, options: Options) -> Options:
    """Return the options with every role replaced by the name of the module that has it."""
    changes = {}
    for option in ("frozen", "fast", "train", "exclude"):
        patterns = getattr(options, option)
        if any(p in ROLES for p in patterns):
            names = [name for p in patterns if (name := (find_role(net, p, True) if p in ROLES else p)) is not None]
            changes[option] = tuple(names)
    return options.replace(**changes) if changes else options


def find_role(net: nn.Module, role: str, convolutions: bool = False) -> str | None:
    """Return the name of the module that has a role; a classifier that is a convolution only where that is asked."""
    if role == "@bottleneck":
        names = (plain_name(name) for name, _ in net.named_modules())
        return next((name for name in names if name == "bottleneck"), None)
    return find_classifier(net, convolutions)[0]


def find_classifier(net: nn.Module, convolutions: bool = True) -> tuple[str | None, bool]:
    """Return the name of the classifier, and whether that is more than a guess."""
    modules = {plain_name(name): module for name, module in net.named_modules() if plain_name(name)}
    sizes: dict[str, int] = {}  # the dimensions of each module's own weights
    for name, module in modules.items():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            # A parametrized layer keeps its matrix in a child; the layer itself is meant.
            layer = name.split(".parametrizations")[0]
            own = [p.ndim for p in module._parameters.values() if p is not None]
            sizes[layer] = max([*own, sizes.get(layer, 0)])
    matrices = [name for name, size in sizes.items() if size == 2]
    # Not deeper than backbone.head: blocks have an "fc" of their own. A convolution may be one, if it is called so.
    called = [found for name, size in sizes.items() if size == 2 and (found := _called(name))]
    if not called and convolutions:
        called = [found for name, size in sizes.items() if size > 2 and (found := _called(name))]
    if called:
        top = min(depth for depth, _, _ in called)
        names = [(stem, name) for depth, stem, name in called if depth == top]
        last = names[-1][1]
        return last, len({stem for stem, _ in names}) == 1 or [last] == matrices[-1:]
    if not matrices and convolutions:
        matrices = [name for name, size in sizes.items() if size > 2]
    if not matrices:
        return None, False
    parts = matrices[-1].split(".")
    parents = [net, *(modules[".".join(parts[:i])] for i in range(1, len(parts)))]
    # In a Sequential the last layer is called last; elsewhere only the network's own code knows.
    return matrices[-1], len(matrices) == 1 or all(isinstance(m, nn.Sequential) for m in parents)


def _called(name: str) -> tuple[int, str, str] | None:
    """Return the depth at which a module's path has a classifier's name, that name, and the path; None without one."""
    for depth, part in enumerate(name.split(".")[:2]):
        stem = part.lower().rstrip("0123456789")
        if stem in CLASSIFIER_NAMES or (depth == 0 and stem in OUTERMOST_NAMES):
            return depth, stem, name
    return None
