"""Signals that come in the middle of a step: held back, and each handed on once."""

import asyncio
import os
import signal

import pytest

from undrift.system.interrupts import uninterrupted


def test_both_signals_reach_their_handlers_afterwards_in_their_order() -> None:
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert came == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.skipif(not hasattr(signal, "set_wakeup_fd") or os.name == "nt", reason="asyncio has no such handlers")
def test_an_event_loop_hears_of_a_signal_once() -> None:
    heard: list[str] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, heard.append, "term")
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(5):
            await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(serve())
    assert heard == ["term"]
