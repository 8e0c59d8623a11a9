"""What holds on to the source beside the KL, one file each: see `Keeper` for when a loop asks it what."""

from undrift._types import Keeper

__all__ = ["Keeper"]
