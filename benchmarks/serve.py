"""Load test of a server with OpenAI's interface: Poisson arrivals, mixed lengths.

    jaxllm serve path/to/model &
    python benchmarks/serve.py --url http://127.0.0.1:8000 --rate 4 --requests 100

Reports throughput, time to first token, and the time between the events of a stream. It knows
nothing of the server but its interface, so the same command measures others (llama-server, vLLM).
Arrivals and prompts follow from the seed alone. Needs httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import time
from pathlib import Path

import httpx

_TEXT = "the sea was calm and a small boat came home with its nets full of silver fish"


@dataclasses.dataclass
class Result:
    """Times of one request, in seconds from its start."""

    seconds: float = 0.0
    events: list[float] = dataclasses.field(default_factory=list)
    """When each part of the text came."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """As the server reports them, or else the number of events."""
    error: str | None = None


async def ask(client: httpx.AsyncClient, body: dict[str, object]) -> Result:
    """One streamed request."""
    result, start = Result(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                result.error = f"{answer.status_code} {answer.text[:80]}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices") and event["choices"][0].get("text"):
                    result.events.append(time.perf_counter() - start)
                if usage := event.get("usage"):
                    result.prompt_tokens = usage["prompt_tokens"]
                    result.new_tokens = usage["completion_tokens"]
    except httpx.HTTPError as error:
        result.error = repr(error)
    result.new_tokens = result.new_tokens or len(result.events)
    result.seconds = time.perf_counter() - start
    return result


async def run(arguments: argparse.Namespace) -> list[Result]:
    """All requests, at exponentially distributed intervals."""
    rng = random.Random(arguments.seed)
    headers = {"Authorization": f"Bearer {arguments.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=600, limits=limits
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        shared = " ".join(rng.choices(_TEXT.split(), k=arguments.shared_words))
        tasks = []
        for number in range(arguments.requests):
            words = rng.choices(_TEXT.split(), k=rng.randint(*arguments.prompt_words))
            body = {
                "model": model,
                "prompt": " ".join([shared, *words]),
                "max_tokens": rng.randint(*arguments.new_tokens),
                "temperature": arguments.temperature,
                "seed": number,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            tasks.append(asyncio.create_task(ask(client, body)))
            await asyncio.sleep(rng.expovariate(arguments.rate) if arguments.rate else 0)
        return await asyncio.gather(*tasks)


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the values lies.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def report(results: list[Result], seconds: float) -> dict[str, float | int]:
    """Figures of a run; all times are in seconds."""
    good = [result for result in results if result.error is None and result.events]
    first = [result.events[0] for result in good]
    gaps = [b - a for result in good for a, b in itertools.pairwise(result.events)]
    per_token = [
        (result.events[-1] - result.events[0]) / (result.new_tokens - 1)
        for result in good
        if result.new_tokens > 1
    ]
    figures: dict[str, float | int] = {
        "requests": len(results),
        "errors": len(results) - len(good),
        "seconds": seconds,
        "requests/s": len(good) / seconds,
        "prompt tokens/s": sum(r.prompt_tokens for r in good) / seconds,
        "new tokens/s": sum(r.new_tokens for r in good) / seconds,
    }
    for name, values in (("first token", first), ("between events", gaps)):
        for p in (50, 95, 99) if values else ():
            figures[f"{name} p{p}"] = percentile(values, p / 100)
    if per_token:
        figures["per token, mean"] = statistics.mean(per_token)
        figures["request p50"] = percentile([result.seconds for result in good], 0.5)
    return figures


def main() -> None:
    """Runs the load test and prints its figures."""
    parser = argparse.ArgumentParser(description="Load test of a server with OpenAI's interface.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2.0, help="per second; 0: all at once")
    parser.add_argument("--prompt-words", type=int, nargs=2, default=(16, 96))
    parser.add_argument("--shared-words", type=int, default=0, help="that begin every prompt")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(16, 96))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    start = time.perf_counter()
    results = asyncio.run(run(arguments))
    figures = report(results, time.perf_counter() - start)
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(json.dumps(figures) + "\n")
    for name, value in figures.items():
        print(f"{name:20} {value:10.3f}" if isinstance(value, float) else f"{name:20} {value:10}")
    for error in sorted({r.error for r in results if r.error}):
        print(error)


if __name__ == "__main__":
    main()
