"""Claim: `examples/serve.py` loses no request, also across a restart, while it adapts.

Clients on the same machine send images over kept connections, each the next one as soon as the last is answered. Half
way the server gets SIGTERM and is started again on the same socket, which keeps new connections waiting meanwhile. A
connection that was closed under a request is opened again and the request sent again: it counts as sent again, and as
lost if it then gets no answer. A control answers without learning; another serves the same network by LitServe, without
learning: what a server of its own for networks would gain.

Command:   python benchmarks/serving.py [--seconds 20] [--clients 16] [--rounds 2] [--seed 0]
Needs:     pip install "undrift[serve,images]", and litserve for its row.
Hardware:  two CPU cores for server and clients together, shared with other work: compare rows, not machines.
Output:    serving.json under --results; prints a table.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.table import markdown

ROOT = Path(__file__).parents[1]
READY = 60.0  # seconds that a server may take to start
LITSERVE = """
import base64, io, sys
import litserve, torch, undrift
from PIL import Image
from undrift.images import Preprocess

class Answers(litserve.LitAPI):
    def setup(self, device):
        torch.manual_seed(0)
        layers = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
        net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(16, 10)).eval()
        self.model, self.preprocess = net, Preprocess(resize=36, crop=32)

    def decode_request(self, request):
        image = Image.open(io.BytesIO(base64.b64decode(request["image"]))).convert("RGB")
        return self.preprocess.normalise(self.preprocess.frame_image(image)[None])[0]

    def batch(self, inputs):
        return torch.stack(inputs)

    def predict(self, images):
        return undrift.predict(self.model, images)

    def unbatch(self, found):
        return list(zip(found.label.tolist(), found.probs.amax(1).tolist(), found.mutual_info.tolist()))

    def encode_response(self, row):
        return {"label": row[0], "probability": row[1], "mutual_info": row[2]}

if __name__ == "__main__":
    server = litserve.LitServer(Answers(max_batch_size=32, batch_timeout=0.002), accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
"""


def pictures(count: int, seed: int) -> list[bytes]:
    """Return PNG files of random images."""
    generator, out = np.random.default_rng(seed), []
    for _ in range(count):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(buffer, "png")
        out.append(buffer.getvalue())
    return out


class Clients:
    """Sends requests and keeps the books: every number that was taken has to get one answer."""

    def __init__(self, port: int, bodies: list[bytes]) -> None:
        self.port, self.bodies = port, bodies
        self.taken = 0
        self.latencies: dict[int, float] = {}
        self.again = 0
        self.wrong: list[str] = []

    async def run(self, clients: int, seconds: float) -> None:
        """Let so many clients send one request after the other for some time."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def _client(self, until: float) -> None:
        connection = None
        while time.monotonic() < until:
            number, begun = self.taken, time.monotonic()
            self.taken += 1
            while time.monotonic() < until + READY:
                try:
                    if connection is None:
                        connection = await asyncio.open_connection("127.0.0.1", self.port)
                    status, body = await asyncio.wait_for(
                        _ask(*connection, self.bodies[number % len(self.bodies)]), READY
                    )
                except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                    connection = None
                    self.again += 1
                    await asyncio.sleep(0.01)
                    continue
                if status != 200 or "label" not in json.loads(body):
                    self.wrong.append(f"{status}: {body[:80]!r}")
                else:
                    assert number not in self.latencies
                    self.latencies[number] = time.monotonic() - begun
                break
        if connection is not None:
            connection[1].close()

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return what a table shows."""
        times = sorted(self.latencies.values())
        return {
            "requests": self.taken,
            "per second": len(times) / seconds,
            "p50 ms": 1000 * statistics.median(times),
            "p99 ms": 1000 * times[int(0.99 * (len(times) - 1))],
            "longest ms": 1000 * times[-1],
            "lost": self.taken - len(times),
            "sent again": self.again,
            "wrong": self.wrong[:5],
        }


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all rounds as one row: sums of counts, medians of the rest."""
    sums = {name: sum(found[name] for found in rounds) for name in ("requests", "lost", "sent again")}
    speeds: tuple[str, ...] = ("per second", "p50 ms", "p99 ms", "longest ms")
    speeds += ("CPU ms",) if "CPU ms" in rounds[0] else ()
    return sums | {name: statistics.median(found[name] for found in rounds) for name in speeds}


def page(record: dict[str, Any]) -> str:
    """Return the table of docs/how-to/serve.md."""
    lines = []
    for row, found in record["rows"].items():
        speeds = [f"{found['per second']:.0f}", *(f"{found[name]:.0f}" for name in ("p50 ms", "p99 ms", "longest ms"))]
        used = f"{found['CPU ms']:.1f}" if "CPU ms" in found else "–"
        lines.append([row, *speeds, used, found["lost"], found["sent again"]])
    header = ["", "requests/s", "p50 ms", "p99 ms", "longest ms", "CPU ms per request", "lost", "sent again"]
    rounds = len(record["rounds"]["answers only"])
    how = (
        f"{record['clients']} clients, {record['seconds']:.0f} s each; rounds: {rounds}; seed {record['seed']}. "
        f"{record['hardware']}, {record['cores']} cores shared with other work, {record['date']}."
    )
    return f"{how}\n\n{markdown(header, lines)}"


def start(listening: socket.socket, folder: Path, learns: bool) -> "subprocess.Popen[bytes]":
    """Start the example on a socket that is open already."""
    code = "" if learns else "import serve; serve.SHARE = 1e-9; serve.Service.learn = lambda self, stop: stop.wait()\n"
    code += "import sys, uvicorn; uvicorn.run('serve:demo', factory=True, fd=int(sys.argv[1]), log_level='warning')"
    words = [sys.executable, "-c", code, str(listening.fileno())]
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src")])
    env = {**os.environ, "UNDRIFT_STATE": str(folder), "PYTHONPATH": path}
    return subprocess.Popen(words, env=env, pass_fds=[listening.fileno()], start_new_session=True)


async def measured(
    server: "subprocess.Popen[bytes]", port: int, seconds: float, clients: int, seed: int, as_json: bool = False
) -> dict[str, Any]:
    """Return the figures of a server that is there."""
    bodies = pictures(256, seed)
    if as_json:  # LitServe's requests
        bodies = [json.dumps({"image": base64.b64encode(body).decode()}).encode() for body in bodies]
    await Clients(port, bodies).run(2, 3)  # until it is warm
    load = Clients(port, bodies)
    begun, before = time.monotonic(), cpu_seconds(server.pid)
    await load.run(clients, seconds)
    used = cpu_seconds(server.pid) - before
    return {**load.figures(time.monotonic() - begun), "CPU ms": 1000 * used / len(load.latencies)}


def cpu_seconds(group: int) -> float:
    """Return the processor time of a group of processes so far: on a shared machine it says more than the clock."""
    ticks = 0
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = place.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


async def across_a_restart(
    listening: socket.socket, folder: Path, seconds: float, clients: int, seed: int
) -> dict[str, Any]:
    """Return the figures of the example while it is stopped and started again half way."""
    port, bodies = listening.getsockname()[1], pictures(256, seed)
    server = start(listening, folder, learns=True)
    await Clients(port, bodies).run(2, 3)
    load, begun = Clients(port, bodies), time.monotonic()
    sending = asyncio.create_task(load.run(clients, seconds))
    await asyncio.sleep(seconds / 3)
    before = await health(port)
    stopped = time.monotonic()
    server.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(server.wait, READY)
    server = start(listening, folder, learns=True)
    after = await health(port)
    down = time.monotonic() - stopped
    await sending
    took = time.monotonic() - begun
    server.send_signal(signal.SIGTERM)
    await asyncio.to_thread(server.wait, READY)
    figures = load.figures(took)
    return {**figures, "exit code": code, "seconds down": down, "learned before": before, "learned after": after}


async def health(port: int) -> str:
    """Return what the server's stream says of itself."""
    until = time.monotonic() + READY
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            content = await asyncio.wait_for(reader.read(), READY)
            return str(json.loads(content.partition(b"\r\n\r\n")[2])["report"])
        except (OSError, ValueError):  # noqa: PERF203
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)


def listening_socket() -> socket.socket:
    """Return a socket that takes connections, whether or not a server is there to answer them."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # uvicorn does not set it on a socket that it is handed, and Nagle's algorithm would hold answers back.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.bind(("127.0.0.1", 0))
    found.listen(256)
    return found


def litserve_row(folder: Path, seconds: float, clients: int, seed: int) -> dict[str, Any] | None:
    """Return the figures of LitServe with the same network, or None where it is not installed."""
    if find_spec("litserve") is None:
        return None
    (folder / "lit.py").write_text(LITSERVE)
    with listening_socket() as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, str(folder / "lit.py"), str(port)]
    server = subprocess.Popen(words, env=env, start_new_session=True)  # its workers outlive it: end the whole group
    try:
        until = time.monotonic() + READY
        while time.monotonic() < until and not answers(port):
            time.sleep(0.5)
        return asyncio.run(measured(server, port, seconds, clients, seed, as_json=True))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(port: int) -> bool:
    """Return whether somebody takes connections."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """Measure, write the record and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    how = given.seconds, given.clients, given.seed
    rounds: dict[str, list[dict[str, Any]]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(given.rounds):  # in turns, as the machine is shared
            for row, learns in (("answers only", False), ("answers and learns", True)):
                with listening_socket() as listening:
                    server = start(listening, folder / f"{row} {number}", learns)
                    try:
                        found = asyncio.run(measured(server, listening.getsockname()[1], *how))
                    finally:
                        server.send_signal(signal.SIGTERM)
                        server.wait(READY)
                rounds.setdefault(row, []).append(found)
                print(f"{row}: {found['per second']:.0f} requests/s", file=sys.stderr)
            with listening_socket() as listening:
                found = asyncio.run(across_a_restart(listening, folder / f"restart {number}", *how))
            rounds.setdefault("learns, restarted on the way", []).append(found)
            if (other := litserve_row(folder, *how)) is not None:
                rounds.setdefault("LitServe, answers only", []).append(other)
    rows = {row: together(found) for row, found in rounds.items()}
    packages = {package: version(package) for package in ("fastapi", "uvicorn")}
    if "LitServe, answers only" in rows:
        packages["litserve"] = version("litserve")
    about = machine(torch.device("cpu")) | {"cores": os.cpu_count(), "threads": torch.get_num_threads(), **packages}
    record = {
        **about,
        "seconds": given.seconds,
        "clients": given.clients,
        "seed": given.seed,
        "rows": rows,
        "rounds": rounds,
    }
    write_text(given.results / "serving.json", json.dumps(record, indent=1) + "\n")
    print(page(record))


if __name__ == "__main__":
    main()
