"""Prometheus metrics of a server."""

from __future__ import annotations

from typing import Any

from jaxllm.common.optional_packages import require

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Counters and histograms, in a registry of their own."""

    def __init__(self) -> None:
        client = require("prometheus_client", extra="serve", purpose="metrics")
        self._client = client
        self._registry = client.CollectorRegistry()

        def metric(kind: Any, name: str, doc: str, labels: tuple[str, ...] = (), **options: Any):
            return kind(f"jaxllm_{name}", doc, labels, registry=self._registry, **options)

        path = ("path",)
        self.requests = metric(
            client.Counter, "requests", "Requests by path and status", ("path", "status")
        )
        self.seconds = metric(
            client.Histogram, "request_seconds", "Time of a request", path, buckets=_SECONDS
        )
        self.first_token = metric(
            client.Histogram,
            "time_to_first_token_seconds",
            "Time from a request to its first token",
            path,
            buckets=_SECONDS,
        )
        self.prompt_tokens = metric(client.Counter, "prompt_tokens", "Tokens of prompts")
        self.new_tokens = metric(client.Counter, "new_tokens", "Generated tokens")
        self.running = metric(client.Gauge, "running_sequences", "Sequences in slots")
        self.waiting = metric(client.Gauge, "waiting_sequences", "Sequences that wait for a slot")
        self.slots = metric(client.Gauge, "slots", "Sequences that can be decoded at once")
        self.decode_steps = metric(client.Gauge, "decode_steps", "Decode steps since the start")
        self.prefix_hits = metric(client.Gauge, "prefix_hits", "Prompts with a kept prefix")
        self.prefix_tokens = metric(
            client.Gauge, "prefix_tokens", "Prompt tokens that a kept prefix saved"
        )

    def render(self) -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        return self._client.generate_latest(self._registry), self._client.CONTENT_TYPE_LATEST
