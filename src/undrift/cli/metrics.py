"""Serve a stream's heartbeat to Prometheus from a thread of this process, if requested."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from undrift._errors import DataError, UndriftError

COUNTERS = {
    "images": "Images answered.",
    "batches": "Batches answered.",
    "steps": "Optimiser steps made.",
    "skipped": "Images with NaN or infinity.",
    "unreadable": "Images that could not be read.",
    "missed": "Batches without a step.",
    "resets": "Resets to the start state.",
}
ESTIMATES = {
    "source": "accuracy of the source network",
    "adapted": "accuracy of the adapted network",
    "gain": "accuracy gained by adaptation",
}


@contextmanager
def serving(port: int | None, host: str, read: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Serve what `read` returns under http://host:port/metrics for a `with` block; without a port do nothing."""
    if port is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise UndriftError(
            "prometheus_client is not installed; needed for --metrics-port. Install it: pip install "
            "'undrift[metrics]', or read --health FILE instead."
        ) from error
    registry = CollectorRegistry()
    registry.register(_Pictures(read))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise DataError(
            f"--metrics-port {port} of {host} cannot be opened ({error.strerror or error}); needed: a free port. "
            "Choose another one, or end the program that holds it."
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Pictures:
    """What a registry collects: the latest picture, as metrics."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """Yield every metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._read()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"undrift_{name}", text, value=now.get(name, 0))
        events = CounterMetricFamily("undrift_events", "What the stream noticed and decided.", labels=["kind"])
        for kind, count in now["happened"].items():
            events.add_metric([kind], count)
        yield events
        yield GaugeMetricFamily("undrift_uptime_seconds", "Seconds since the stream began.", value=now["seconds"])
        latency = GaugeMetricFamily("undrift_latency_seconds", "Wait of an image for its answer.", labels=["quantile"])
        for name, wait in now["latency_ms"].items():
            latency.add_metric([f"{float(name[1:]) / 100:g}"], wait / 1e3)
        yield latency
        for part, text in ESTIMATES.items() if now["helping"] else ():
            found = now["helping"][part]
            yield GaugeMetricFamily(f"undrift_{part}_accuracy", f"Estimated {text}, no labels.", value=found["value"])
            yield GaugeMetricFamily(f"undrift_{part}_accuracy_error", "Its standard error.", value=found["error"])
