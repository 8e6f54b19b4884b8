"""Tokens a second, MFU and the time that is left, from what the last steps took."""

from __future__ import annotations

import dataclasses
from collections import deque

from jaxllm.training.monitor.flops import Peak

WINDOW = 20
"""Steps over which speeds are averaged."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Of the last steps; None where nothing is known yet."""

    tokens_per_second: float | None = None
    """Real tokens, no pads."""
    mfu: float | None = None
    """Share of the devices' peak, from 0 to 1."""
    seconds_per_step: float | None = None

    def metrics(self) -> dict[str, float]:
        """Fields for the metrics log; those that are not known are left out."""
        named = {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        return {name: value for name, value in named.items() if value is not None}


class Throughput:
    """Averages over the last `WINDOW` steps.

    A step that compiled is left out: its time says nothing about the steps to come.

    >>> throughput = Throughput(Peak(1e9, "an example"))
    >>> throughput.add(seconds=0.5, tokens=100, flops=1e8)
    >>> throughput.speed()
    Speed(tokens_per_second=200.0, mfu=0.2, seconds_per_step=0.5)
    """

    def __init__(self, peak: Peak | None = None) -> None:
        self._peak = peak
        self._steps: deque[tuple[float, int, float | None]] = deque(maxlen=WINDOW)

    def add(self, *, seconds: float, tokens: int, flops: float | None = None) -> None:
        """One step: how long it took, its real tokens, its model FLOPs (None: not known)."""
        self._steps.append((seconds, tokens, flops))

    def speed(self) -> Speed:
        seconds = sum(step[0] for step in self._steps)
        if seconds <= 0:
            return Speed()
        flops = [step[2] for step in self._steps if step[2] is not None]
        mfu = None
        if self._peak is not None and len(flops) == len(self._steps):
            mfu = sum(flops) / seconds / self._peak.flops
        return Speed(
            tokens_per_second=sum(step[1] for step in self._steps) / seconds,
            mfu=mfu,
            seconds_per_step=seconds / len(self._steps),
        )


def clock_time(seconds: float) -> str:
    """
    >>> clock_time(59.6), clock_time(3725), clock_time(200000)
    ('1:00', '1:02:05', '2d 7:33:20')
    """
    whole = round(seconds)
    days, whole = divmod(whole, 86400)
    hours, whole = divmod(whole, 3600)
    minutes, left = divmod(whole, 60)
    start = f"{days}d " if days else ""
    if days or hours:
        return f"{start}{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}"
