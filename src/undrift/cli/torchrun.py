"""Set up the process group of processes that `torchrun` started, and let the first one print."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from undrift._errors import OptionError

if TYPE_CHECKING:
    import torch

ABLE = {
    "adapt": "they share each batch",
    "predict": "with --parts, each takes the next part of the images",
}
"""Commands that several processes can run, and how."""


class Crew:
    """This process among those that one `torchrun` started; without it, one alone.

    Attributes:
        rank: number of this process, from 0; the first one prints and writes.
        count: how many there are, on all machines; `local` is this one's number on its machine.
    """

    def __init__(self) -> None:
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        self.rank, self.count, self.local = (
            int(os.environ[name]) if launched else otherwise
            for name, otherwise in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        self._tells: bool | None = None

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def tells_first(self) -> bool:
        """Return whether this process is the first with a reason for the end; the others stay silent."""
        if self._tells is None:
            self._tells = self.first
            if self.count > 1:
                with suppress(RuntimeError):  # torchrun itself is gone
                    self._tells = bool(self._store().add("undrift/told", 1) == 1)
        return self._tells

    def device(self, wanted: str) -> "torch.device":
        """Return the device that was asked for; of several GPUs, the one of this process."""
        import torch

        from undrift.system.validate import pick_device

        device = pick_device(wanted)
        if device.type != "cuda" or wanted not in ("auto", "cuda") or self.count == 1:
            return device
        if self.local >= torch.cuda.device_count():
            raise OptionError(
                f"process {self.local} of this machine has no GPU, as there are {torch.cuda.device_count()}; needed: "
                "one each. Start fewer with --nproc-per-node, or give --device cpu."
            )
        device = torch.device("cuda", self.local)
        torch.cuda.set_device(device)
        return device

    @contextmanager
    def together(self, device: "torch.device") -> Iterator[None]:
        """Join the processes in a group for the length of a `with` block; nothing for one process."""
        if self.count == 1:
            yield
            return
        from torch import distributed

        from undrift.system.ranks import background_threads

        backend = "nccl" if device.type == "cuda" else "gloo"
        with background_threads():
            distributed.init_process_group(backend, store=self._store(), rank=self.rank, world_size=self.count)
        try:
            yield
        except BaseException:
            self.tells_first()  # before the others notice that this one is gone
            raise
        finally:
            distributed.destroy_process_group()

    def all_of(self, mine: Mapping[str, str]) -> dict[str, str]:
        """Return what all processes found, inside `together`."""
        if self.count == 1:
            return dict(mine)
        from undrift.system.ranks import gather_texts

        return {
            name: value for text in gather_texts(json.dumps(dict(mine))) for name, value in json.loads(text).items()
        }

    def _store(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun keeps a store for its processes, unless told not to: then the first of them does.
        master = self.first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return TCPStore(address, port, self.count, master, timedelta(minutes=5), wait_for_workers=False)


def refuse_many(command: str) -> None:
    """Raise if torchrun started several processes of a command that one has to run."""
    crew = Crew()
    if crew.count > 1 and command not in ABLE:
        able = "; ".join(f"undrift {name} ({how})" for name, how in ABLE.items())
        why = ", as a stream's steps follow each other in the order of its images" if command == "stream" else ""
        raise OptionError(
            f"torchrun started {crew.count} processes of undrift {command}; needed: one{why}. Start it without "
            f"torchrun. With it run: {able}."
        )
