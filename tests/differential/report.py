"""Counts what a randomised comparison ran, and sorts what differed into documented and new."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("jax", "flax", "numpy", "torch", "transformers", "peft", "trl", "optax")


@dataclasses.dataclass
class Report:
    """Result of one comparison script: combinations and differences of each area."""

    documented: dict[str, str] = dataclasses.field(default_factory=dict)
    """Known differences: a short name, and the page of docs/ or the reason that explains it."""
    ran: Counter[str] = dataclasses.field(default_factory=Counter)
    """Number of combinations compared, by area."""
    known: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    """Number of documented differences, by area and name."""
    new: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """Every other difference: its area, the combination and what differed."""
    started: float = dataclasses.field(default_factory=time.monotonic)

    def equal(self, area: str) -> None:
        """Records a combination in which nothing differed."""
        self.ran[area] += 1

    def explained(self, area: str, name: str) -> None:
        """Records a combination with a documented difference; `name` is a key of `documented`."""
        if name not in self.documented:
            raise KeyError(f"no documented difference is called {name!r}")
        self.ran[area] += 1
        self.known.setdefault(area, Counter())[name] += 1

    def differs(self, area: str, combination: object, difference: str) -> None:
        """Records a combination with a difference that nothing explains."""
        self.ran[area] += 1
        self.new.append({"area": area, "combination": str(combination), "difference": difference})
        print(f"NEW DIFFERENCE  {area}: {combination}: {difference}", flush=True)

    def finish(self, out: Path | None = None) -> int:
        """Prints the table and returns the exit status: 1 if there are new differences."""
        new = Counter(x["area"] for x in self.new)
        print("\n| area | combinations | documented differences | new differences |")
        print("|---|---|---|---|")
        for area, count in self.ran.items():
            known = ", ".join(f"{n} x {name}" for name, n in self.known.get(area, {}).items())
            print(f"| {area} | {count} | {known or 0} | {new[area]} |")
        seconds = time.monotonic() - self.started
        print(f"\n{seconds:.0f} s; {versions()}")
        if out is not None:
            facts = {"ran": self.ran, "documented": self.known, "new": self.new}
            facts |= {"seconds": round(seconds), "versions": versions()}
            out.write_text(json.dumps(facts, indent=1) + "\n")
        return 1 if self.new else 0


def versions() -> str:
    """Names and versions of the packages that the results depend on."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def arguments(description: str, areas: list[str]) -> argparse.Namespace:
    """Parses the options that all comparison scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--area", nargs="+", choices=areas, default=areas, help="what to compare")
    parser.add_argument("--count", type=int, help="combinations of each area")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random combinations")
    parser.add_argument("--out", type=Path, help="write the counts and differences as JSON")
    parser.add_argument(
        "--store", action="store_true", help="renew the stored sample in tests/data"
    )
    return parser.parse_args()
