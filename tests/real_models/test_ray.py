"""Prediction on a local Ray cluster of two workers: one of them is killed, and no image is lost or answered twice."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import undrift
from undrift.cli import main

ray = pytest.importorskip("ray")
SOURCE, EXAMPLES = Path(undrift.__file__).parents[1], Path(__file__).parents[2] / "examples"
IMAGES, BATCH = 96, 4
NETWORK = """
import os, time
from pathlib import Path
from torch import nn

class Slow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))

    def forward(self, images):
        if "CALLS" in os.environ:
            with Path(os.environ["CALLS"]).open("a") as file:
                file.write(f"{os.getpid()} ")
            time.sleep(0.2)
        return super().forward(images)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with a slow network that notes who calls it, and a cluster of two workers: it starts once."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "slow_net.py").write_text(NETWORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # it would write a token to the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        paths = ":".join(map(str, (SOURCE, EXAMPLES, folder)))
        variables = {"PYTHONPATH": paths, "CALLS": str(folder / "calls")}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
        yield folder
        ray.shutdown()
    sys.modules.pop("slow_net", None)


def kill_one(calls: Path, killed: list[int], ended: threading.Event) -> None:
    """Kill the latest caller once two processes have called; a busy machine may take minutes to start them."""
    while not killed and not ended.is_set():
        found = calls.read_text().split() if calls.exists() else []
        if len(set(found)) == 2 and len(found) >= IMAGES // BATCH // 3:
            killed.append(int(found[-1]))
            os.kill(killed[0], signal.SIGKILL)
        time.sleep(0.02)


@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_killed_worker_of_ray_loses_no_image_and_doubles_none(work: Path) -> None:
    from ray_predict import predict
    from slow_net import Slow

    save_file(Slow().state_dict(), work / "net.safetensors")
    pixels = torch.randint(256, (IMAGES, 12, 12, 3), dtype=torch.uint8)
    np.save("images.npy", pixels.numpy())
    model = ["--model", "slow_net:Slow", "--weights", str(work / "net.safetensors"), "--preprocess", "none"]
    words = [str(work / "images.npy"), *model, "--batch-size", str(BATCH)]
    assert main(["predict", *words, "--out", "whole.csv"]) == 0
    killed: list[int] = []
    ended = threading.Event()
    killer = threading.Thread(target=kill_one, args=(work / "calls", killed, ended))
    killer.start()
    try:
        predict(2, [*words, "--out", str(work / "a.csv")])
    finally:
        ended.set()
        killer.join()
    assert killed
    assert Path("a.csv").read_bytes() == Path("whole.csv").read_bytes()


@pytest.mark.filterwarnings("default")
def test_what_undrift_refuses_ends_the_job(work: Path) -> None:
    from ray_predict import predict

    with pytest.raises(RuntimeError, match="undrift predict ended with"):
        predict(1, ["no-such-folder", "--out", str(work / "a.csv")])
