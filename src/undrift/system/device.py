"""Choose a device by name."""

import torch

from undrift._errors import OptionError


def pick_device(device: torch.device | str) -> torch.device:
    """Return the device; raise if it is a GPU that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"there is no device {device!r}; needed: auto, cpu or cuda. Use device='auto'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {device} was asked for and PyTorch sees no GPU; needed: a GPU with its driver. Use device='cpu'."
        )
    return place
