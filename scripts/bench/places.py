"""Where things lie, and what a piece of work is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DEMO = PROJECT / ".demo"


@dataclass(frozen=True)
class Work:
    """Photos and models. Models are named by their folders; `torch_*` are the same models for torch."""

    photos: str
    limit: int
    embedder: str
    detector: str | None = None
    torch_embedder: str | None = None
    torch_detector: str | None = None
    # Of croprow, so that it does what the peers do.
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    bench: Path
    scratch: Path
    python: Path
    runtime: Path

    @staticmethod
    def of_project() -> Places:
        bench = DEMO / "bench"
        scratch = bench / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        return Places(bench, scratch, DEMO / "venv-bench/bin/python", DEMO / "runtime/libonnxruntime.so")

    def photos_of(self, name: str) -> Path:
        return self.bench / f"photos/{name}.db"

    def model(self, name: str) -> Path:
        """Seeded models first, then the trained ones of fetch-demo.sh."""
        seeded = self.bench / "models" / name
        return seeded if seeded.is_dir() else DEMO / "models" / name

    def peer(self, name: str) -> list[str]:
        return [str(self.python), str(Path(__file__).with_name("peer") / f"{name}.py")]
