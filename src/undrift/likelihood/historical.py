"""HCL: weight pseudo-labels and contrast features by the network's own past (Huang et al. 2021)."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from undrift._errors import DataError, OptionError
from undrift._types import Batches, Step
from undrift.likelihood.features import SeesFeatures, latest
from undrift.likelihood.wrap import check_positions
from undrift.posterior.batch import device_of, to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import adapted

State = dict[str, Tensor]


@dataclass(eq=False, kw_only=True)
class Hcl(SeesFeatures):
    """Historical contrast of categories and of instances, for classifiers; the authors' code segments images.

        HCCD = mean_i w_ŷ · exp(−KL(G_h‖G_m)_i) · −ln G(x_i)[ŷ_i]
        HCID = mean_i −1/n Σ_{j≠i, ŷ_j=ŷ_i} ln( r_j e^{q_i·k_j/τ} / Σ_{l≠i} r_l e^{q_i·k_l/τ} )
        loss = HCCD + instance_weight · HCID

    G is the adapting network. G_m follows it: before each step its weights become 0.996 G_m + 0.004 G, and its norm
    statistics those of G. G_h is the source at first. Every `every` steps G_m and G_h are set to G. q and k are
    L2-normalised features of G and G_m; r = clip(1.1 − H/ln C, 0.9, 1.1), H the entropy of G_m's answer.

    Choices of ours, as the authors speak of pixels: pseudo-labels ŷ are taken once, from the source network's mean
    answer to an image and its mirror image, without their second scale. Class weights w_c are inverse frequencies of ŷ,
    at most `most_weight`. All networks see the batch as the loader gives it (augment there). There is no auxiliary
    head.

    Args:
        features: name of the submodule whose output, flattened, is the features. None takes "bottleneck" where the
            network has one, else the input of its last linear layer.
        instance_weight: factor before HCID.
        temperature: τ.
        stay: share of G_m that is kept in each step.
        every: steps between two histories.
        most_weight: the greatest class weight.
    """

    instance_weight: float = 0.5
    temperature: float = 0.07
    stay: float = 0.996
    every: int = 300
    most_weight: float = 7.0
    labels: Tensor | None = field(init=False, repr=False, default=None)  # by sample index; −1 is none
    weights: Tensor | None = field(init=False, repr=False, default=None)  # by class
    average: State = field(init=False, repr=False, default_factory=dict)  # G_m's tensors, by the names of G's
    past: State = field(init=False, repr=False, default_factory=dict)  # and G_h
    steps: int = field(init=False, repr=False, default=0)
    _before: State | None = field(init=False, repr=False, default=None)
    _network: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not 0 <= self.stay <= 1 or self.every < 1 or self.temperature <= 0 or self.most_weight <= 0:
            raise OptionError(
                f"{self!r}: stay lies between 0 and 1, every starts at 1, temperature and most_weight are above 0. "
                "HCL's are 0.996, 300 and 0.07."
            )

    def __call__(self, logits: Tensor, step: Step) -> Tensor | None:
        """Move G_m and return the loss of one batch; None if no image has a label."""
        if step.indices is None or self._seen is None or self.labels is None or self.weights is None:
            raise OptionError(
                "Hcl has no pseudo-labels for this batch; it needs a pass over the domain before the first epoch, and "
                "reads the features of each batch. Use it with undrift.adapt."
            )
        queries = latest(self._seen, self.features)
        self._undo()  # drop what a step left that was not made, or another draw of this step
        self._before, self.average = self.average, self._followed(step.model)
        now, keys = self._answer(step, self.average)
        past, _ = self._answer(step, self.past)
        labels = self.labels[step.indices.cpu()].to(logits.device)
        known = labels >= 0
        if not bool(known.any()):
            return None
        trust = torch.exp(-F.kl_div(now, past, reduction="none", log_target=True).sum(1))
        fit = F.cross_entropy(logits, labels, self.weights.to(logits), ignore_index=-1, reduction="none")
        category = (fit * trust.to(fit))[known].mean()
        reliability = reliabilities(now)[known]
        instance = contrast(queries[known], keys[known], labels[known], reliability, self.temperature)
        return category + self.instance_weight * instance

    @torch.no_grad()
    def refresh(self, model: Perturbed, batches: Batches) -> None:
        """Take pseudo-labels from the source network and start the history, before the first epoch only."""
        if self._network == model.key.ident:
            return
        parts = []
        with model.off() as net, evaluating(net):
            for indices, images in batches():
                views = to_device(images, model), to_device(images, model).flip(-1)
                answers = [logits_of(net(x), model.options.outputs) for x in views]
                check_positions(self, answers[0])
                parts.append((indices.cpu(), sum(logits.softmax(1) for logits in answers)))
        if not parts:
            raise DataError("the domain has no batch; pseudo-labels need at least one image. Check the loader.")
        indices, probs = (torch.cat([part[n] for part in parts]) for n in (0, 1))  # type: ignore[misc]
        found = torch.where(torch.isfinite(probs).all(1), probs.argmax(1), -1).cpu()
        self.labels = torch.full((int(indices.max()) + 1,), -1)
        self.labels[indices] = found
        counts = found[found >= 0].bincount(minlength=probs.shape[1])
        self.weights = (counts.sum() / (len(counts) * counts.clamp_min(1))).clamp_max(self.most_weight)
        self.average, self.past, self.steps = _copy(model), _copy(model), 0
        self._before, self._network = None, model.key.ident

    def follow(self, model: Perturbed) -> None:
        """Count the step; every `every` steps set G_m and G_h to the network."""
        self._before = None
        self.steps += 1
        if self.steps % self.every == 0:
            self.average, self.past = _copy(model), _copy(model)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed adaptation needs: labels, class weights, both networks, steps made."""
        self._undo()
        networks = {"average": self.average, "past": self.past}
        tensors = {f"{which}.{name}": t for which, state in networks.items() for name, t in state.items()}
        return {"labels": self.labels, "weights": self.weights, "steps": self.steps, **tensors}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state; `model` is the network that was restored with it."""
        self.labels, self.weights, self.steps, self._before = state["labels"], state["weights"], state["steps"], None

        def those(which: str) -> State:
            names = [key for key in state if key.startswith(f"{which}.")]
            return {key.partition(".")[2]: state[key].to(device_of(model)) for key in names}

        self.average, self.past = those("average"), those("past")
        self._network = None if self.labels is None else model.key.ident

    def _undo(self) -> None:
        if self._before is not None:
            self.average, self._before = self._before, None

    @torch.no_grad()
    def _followed(self, model: Perturbed) -> State:
        """Return the moved G_m, in new tensors, so that the move can be undone."""
        weights = dict(model.named_parameters())
        return {
            name: torch.lerp(now, self.average[name], self.stay) if name in weights else now
            for name, now in _copy(model).items()
        }

    @torch.no_grad()
    def _answer(self, step: Step, state: State) -> tuple[Tensor, Tensor]:
        """Return log-softmax and features of the batch under another state of the network, without noise."""
        assert self._seen is not None
        with step.model.mean():
            logits = logits_of(functional_call(step.model, state, (step.images,)))
        return logits.log_softmax(1), latest(self._seen, self.features)


def reliabilities(log_p: Tensor) -> Tensor:
    """Return r = clip(1.1 − H/ln C, 0.9, 1.1) of each answer."""
    entropy = -(log_p.exp() * log_p).sum(1)
    return (1.1 - entropy / torch.tensor(log_p.shape[1]).log().to(entropy)).clamp(0.9, 1.1)


def contrast(queries: Tensor, keys: Tensor, labels: Tensor, reliability: Tensor, temperature: float) -> Tensor:
    """Return HCID (see `Hcl`): each query against all keys but its own, divided by the number of all keys."""
    similarity = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    weighted = similarity + reliability.to(similarity).log()
    own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    log_p = weighted - weighted.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~own
    return -torch.where(positive, log_p, 0.0).sum(1).mean() / len(labels)


def _copy(model: Perturbed) -> State:
    """Return a copy of all that adapts, without the noise's own state."""
    return {n: t.detach().clone() for n, t in adapted(model).items() if not n.startswith("key.")}
