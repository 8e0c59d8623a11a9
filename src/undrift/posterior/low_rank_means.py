"""Attach low-rank changes to the weights of a network that are trained (option `mean_rank`)."""

from undrift.posterior.low_rank import LowRank, LowRankMeans, is_smaller
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import matching, slot
from undrift.posterior.tied import held_weights


def add_low_rank(model: Perturbed) -> None:
    """Give each trained weight a low-rank change, where its factors are smaller than the weight (`mean_rank`)."""
    options, by_weight = model.options, dict[int, LowRank]()
    for choice in model.choices:
        if not options.mean_rank or not matching(choice.name, options.train) or matching(choice.name, options.frozen):
            continue
        parts = []
        for name, module, attribute, tied in held_weights(choice.layer):
            weight = module._parameters.get(attribute)
            if weight is None or not is_smaller(weight, module, options.mean_rank):
                continue  # a parametrised weight is not ours to change; a small one moves freely
            if tied not in by_weight:
                by_weight[tied] = change = LowRank(module, weight, options.mean_rank)
                # Not by ModuleDict's own setter, which refuses layers called "keys" or "values".
                model.low_rank._modules[slot(choice.name, name)] = change
            parts.append((module, attribute, by_weight[tied]))
        if parts:
            model.changed += parts
            model.low_rank_hooks.append(hooks := LowRankMeans(parts))
            model.add_hook(choice.layer, hooks.after, before=hooks.before)
