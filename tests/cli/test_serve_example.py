"""The example server answers images, learns from them, refuses what is no image, and goes on after SIGTERM."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STARTS = 90.0


def post(port: int, body: bytes) -> dict[str, object]:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data=body, method="POST")
    with urllib.request.urlopen(asked, timeout=STARTS) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def health(port: int) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=STARTS) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.skipif(os.name == "nt", reason="another platform: Linux hands a socket to a process")
def test_it_answers_learns_and_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    import socket

    def start() -> "subprocess.Popen[bytes]":
        code = "import sys, uvicorn; uvicorn.run('serve:demo', factory=True, fd=int(sys.argv[1]), log_level='error')"
        path = os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src")])
        env = {**os.environ, "PYTHONPATH": path, "UNDRIFT_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", code, str(listening.fileno())]
        return subprocess.Popen(words, env=env, pass_fds=[listening.fileno()])

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        port = listening.getsockname()[1]
        server = start()
        try:
            answers = [post(port, picture(seed)) for seed in range(40)]
            assert answers[0].keys() == {"label", "probability", "mutual_info", "pack"}
            with pytest.raises(urllib.error.HTTPError, match="415"):
                post(port, b"no image")
            until = time.monotonic() + STARTS
            while not (tmp_path / "state" / "now.safetensors").exists() and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1)
            before = health(port)
            assert "32 images in 1 batch," in str(before["report"])
            assert before["learns"] is True
            server.send_signal(signal.SIGTERM)
            server.wait(STARTS)
            server = start()
            assert health(port)["report"] == before["report"]
            assert post(port, picture(0))["pack"] == before["pack"]
        finally:
            server.kill()
            server.wait()
