"""Average the answers of several networks that adapt independently."""

from collections.abc import Iterable, Iterator

import torch

from undrift.answer.prediction import Prediction


def together(members: Iterable[Iterable[Prediction]]) -> Iterator[Prediction]:
    """Yield the mean prediction of several streams, batch by batch.

        p = mean_m p_m,   mutual_info = H(p) − mean_m E[H of a draw of member m]

    Each member is a stream of its own network over its own pass of the same batches; share a camera that gives each
    batch once with `itertools.tee`. If a member has no answer for an image, the others answer it.

    Examples:
        >>> import itertools, undrift
        >>> nets = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)) for _ in range(2)]
        >>> camera = itertools.tee((torch.rand(4, 3, 2, 2) for _ in range(3)), 2)
        >>> streams = [undrift.stream(net, eye, method="source") for net, eye in zip(nets, camera, strict=True)]
        >>> [len(p) for p in together(streams)]
        [4, 4, 4]
    """
    for answers in zip(*members, strict=True):
        yield mean_prediction(answers)


def mean_prediction(answers: Iterable[Prediction]) -> Prediction:
    """Return one prediction from those of several networks for the same images."""
    answers = list(answers)
    known = torch.stack([answer.label >= 0 for answer in answers])
    sound = known.any(0)
    share = known.to(answers[0].probs.dtype) / known.sum(0).clamp_min(1)
    probs = sum(part[:, None] * answer.probs for part, answer in zip(share, answers, strict=True))
    # mean H of a member's draws = H of their mean − their mutual information
    inner = sum(part * (answer.entropy - answer.mutual_info) for part, answer in zip(share, answers, strict=True))
    assert isinstance(probs, torch.Tensor) and isinstance(inner, torch.Tensor)  # noqa: PT018  one member at least
    return Prediction.of(probs[sound], inner[sound], sound)
