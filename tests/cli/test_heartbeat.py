"""A stream says how it is doing: the health file, Prometheus metrics, and that neither changes an answer."""

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from faults import missing
from undrift.cli import heartbeat
from undrift.cli.heartbeat import Latency

from .conftest import MODEL, Run, StopWhen

STREAM = ("stream", "target", *MODEL, "--batch-size", "3", "--lr", "0.01")


def read(path: str = "health.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def test_the_quantiles_of_latency_are_those_of_images() -> None:
    latency = Latency()
    assert latency.quantiles() == {}
    latency.add(3.0, 1)
    for _ in range(33):
        latency.add(1.0, 3)
    assert latency.quantiles() == {0.5: 1.0, 0.95: 1.0, 0.99: 1.0}
    latency.add(2.0, 20)
    assert latency.quantiles() == {0.5: 1.0, 0.95: 2.0, 0.99: 2.0}
    for _ in range(5000):  # only the latest batches count
        latency.add(0.5, 1)
    assert latency.quantiles() == {0.5: 0.5, 0.95: 0.5, 0.99: 0.5}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stream say after every batch how it is doing, from ten images on."""
    for name, value in (("PERIOD", 0.0), ("LEAST", 10)):
        monkeypatch.setattr(heartbeat, name, value)


@pytest.mark.usefixtures("often")
def test_the_file_says_how_the_stream_is_doing(run: Run) -> None:
    assert run(*STREAM, "--answers", "plain.csv").code == 0
    path = next(Path("target").rglob("07.png"))
    path.write_bytes(path.read_bytes()[:20])
    found = run(*STREAM, "--answers", "watched.csv", "--health", "health.json", "--json")
    assert found.code == 0, found.err
    now = read()
    assert (now["status"], now["error"], now["images"], now["batches"]) == ("done", None, 29, 10)
    assert (now["unreadable"], now["skipped"], now["resets"]) == (1, 0, 0)
    assert [event["kind"] for event in now["events"]] == ["gather on"]
    assert now["happened"] == {"gather on": 1}
    assert 0 < now["latency_ms"]["p50"] <= now["latency_ms"]["p95"] <= now["latency_ms"]["p99"]
    assert now["helping"]["images"] == 29
    assert now["helping"] == found.json["helping"]
    assert now["helping"]["sentence"] in found.err  # stdout has the JSON object alone
    assert now["started"] <= now["updated"]
    plain = [line for line in Path("plain.csv").read_text().splitlines()[1:] if "07.png" not in line]
    watched = Path("watched.csv").read_text().splitlines()[1:]
    assert plain[:6] == watched[:6]  # estimates were made meanwhile; the damaged image changes the batch after


def test_a_stream_that_stops_or_fails_says_so(run: Run, stop_when: StopWhen) -> None:
    words = (*STREAM, "--answers", "a.csv", "--health", "health.json")
    stop_when("a.csv", 7, *words)
    assert (read()["status"], read()["error"]) == ("stopped", None)
    Image.new("RGB", (5, 9)).save("target/red/10.png")
    found = run(*words, "--force")
    assert (found.code, read()["status"]) == (1, "failed")
    assert "pixels" in read()["error"]


@pytest.mark.usefixtures("often")
def test_a_file_that_cannot_be_written_is_no_reason_to_stop(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise heartbeat.DataError("health.json was not written: the disk is full. Free some space.")

    monkeypatch.setattr(heartbeat, "write_text", full)
    Path("health.json").write_text("{}")
    found = run(*STREAM, "--answers", "a.csv", "--health", "health.json", "--json")
    assert found.code == 0
    assert sum("goes on without it" in text for text in found.json["warnings"]) == 1
    assert Path("a.csv").read_text().count("\n") == 31


@pytest.mark.usefixtures("often")
def test_metrics_are_served_on_loopback_while_the_stream_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    asked: list[tuple[Any, ...]] = []
    pages: list[str] = []
    start, answered = prometheus.start_http_server, heartbeat.Heartbeat.answered

    def starting(*given: Any) -> Any:
        asked.append(given)
        server, thread = start(*given)
        asked.append(server.server_address)
        return server, thread

    def asking(self: heartbeat.Heartbeat, *given: Any) -> None:
        answered(self, *given)
        address, port = asked[1]
        with urllib.request.urlopen(f"http://{address}:{port}/metrics") as page:
            pages.append(page.read().decode())

    monkeypatch.setattr(prometheus, "start_http_server", starting)
    monkeypatch.setattr(heartbeat.Heartbeat, "answered", asking)
    found = run(*STREAM, "--answers", "a.csv", "--metrics-port", "0")
    assert found.code == 0, found.err
    assert asked[0][:2] == (0, "127.0.0.1")
    assert "undrift_images_total 3.0" in pages[0]
    assert "undrift_images_total 30.0" in pages[-1]
    assert 'undrift_events_total{kind="gather on"} 1.0' in pages[-1]
    assert 'undrift_latency_seconds{quantile="0.99"}' in pages[-1]
    assert "undrift_gain_accuracy " in pages[-1]
    address, port = asked[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}:{port}/metrics")


def test_metrics_say_what_they_need(run: Run) -> None:
    words = (*STREAM, "--answers", "a.csv", "--metrics-port")
    with missing("prometheus_client"):
        assert "pip install 'undrift[metrics]'" in run(*words, "1").err
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = run(*words, str(taken.getsockname()[1]))
    assert (found.code, "needed: a free port" in found.err) == (1, True)
    assert not Path("a.csv").exists()
