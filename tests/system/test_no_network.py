"""What is given in place of a network is named, with what to give instead."""

from pathlib import Path

import pytest
import torch
from torch import nn

import undrift


@pytest.mark.parametrize("verb", ["adapt", "stream", "predict", "save", "export", "perturb"])
def test_what_holds_a_network_is_not_one_and_is_told_so(verb: str, tmp_path: Path) -> None:
    net, images = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3)), torch.rand(16, 3, 2, 2)
    history = undrift.adapt(net, images, epochs=1, least_agreement=0.0)
    second = (tmp_path / "a.safetensors",) if verb in ("save", "export") else () if verb == "perturb" else ([images],)
    for given, do in (
        (history, r"a History; .*Give the network in it: history\.model"),
        (nn.Linear, r"a type; .*Make one of the class: Linear\("),
        (net.state_dict(), r"an OrderedDict; .*net\.load_state_dict\(…\), and give that"),
        ("net.pt", r"a str; needed|a str; .*needs"),
    ):
        with pytest.raises(undrift.UndriftError, match=do):
            getattr(undrift, verb)(given, *second)
