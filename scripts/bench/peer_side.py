"""The peers' side of a measurement: each in a process of its own, on the same photos, with the same cores."""

from __future__ import annotations

import json
from pathlib import Path

import program
from croprow_side import Cost
from places import Places, Work

# Images in one call of a model. More is not faster on a CPU and takes more memory.
BATCH = 4
STRONG, LOADER, NAIVE = "onnxruntime_pool", "dataloader_transformers", "naive_torch"
NAMES = {STRONG: "onnxruntime + threads", LOADER: "DataLoader + transformers", NAIVE: "naive torch"}


class Peers:
    def __init__(self, places: Places, threads: int) -> None:
        self.places, self.threads = places, threads

    def run(self, peer: str, work: Work) -> Cost:
        torch = peer != STRONG
        detector = (work.torch_detector if torch else None) or work.detector
        embedder = (work.torch_embedder if torch else None) or work.embedder
        command = self.places.peer(peer) + self._photos(work.photos, work.limit)
        command += ["--embedder", str(self.places.model(embedder)), "--batch", str(BATCH)]
        command += ["--out", str(self.places.scratch / "peer.db")]
        command += ["--threads", str(self.threads), "--workers", str(self.threads)]
        if detector:
            command += ["--detector", str(self.places.model(detector))]
        return self._cost(peer, command, work.limit)

    def preprocess(self, way: str, photos: str, limit: int) -> Cost:
        """Without any model. It goes over the photos again until a second is over."""
        command = self.places.peer("preprocess_only") + self._photos(photos, limit)
        command += ["--method", way, "--workers", str(self.threads)]
        command += ["--processor", str(self.places.model("dinov2-small-onnx"))]
        return self._cost(f"preprocess {way}", command, None)

    def floor(self, work: Work, regions: Path, batch: int) -> dict[str, float]:
        """CPU seconds per image by stage."""
        command = self.places.peer("floor") + self.floor_arguments(work, regions, batch)
        return program.run(command, self.places.scratch / "floor.log").json_line()

    def floor_arguments(self, work: Work, regions: Path, batch: int) -> list[str]:
        """`regions`: a database of croprow over the same photos."""
        arguments = [*self._photos(work.photos, work.limit), "--regions", str(regions), "--batch", str(batch)]
        arguments += ["--embedder", str(self.places.model(work.embedder)), "--threads", str(self.threads)]
        return arguments + (["--detector", str(self.places.model(work.detector))] if work.detector else [])

    def ways(self) -> dict[str, float]:
        """Least cosine to the Hugging Face path, by way of preprocessing."""
        return json.loads((self.places.bench / "ways.json").read_text())["least_cosine"]

    def cosine_of(self, database: Path) -> dict:
        command = self.places.peer("cosine_of_ways")
        command += ["--out", str(self.places.bench / "ways.json"), "--against", str(database)]
        return program.run(command, self.places.scratch / "cosine.log").json_line()

    def _photos(self, photos: str, limit: int) -> list[str]:
        return ["--photos", str(self.places.photos_of(photos)), "--limit", str(limit)]

    def _cost(self, name: str, command: list[str], images: int | None) -> Cost:
        finished = program.run(command, self.places.scratch / "peer.log")
        line = finished.json_line()
        if images is not None and line["images"] != images:
            raise program.ProgramFailed(f"{name} did {line['images']} of {images} photos")
        return Cost(name, line["images"], line["wall_s"], line["cpu_s"], finished.peak_bytes, line)
