"""The scenarios, one function each. A function measures and adds its figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import program
from bench import MEMORY, MIB, Bench, example
from peer_side import LOADER, NAIVE, STRONG
from places import Work

# The peers keep the best region of a photo, or all of it.
ONE_REGION = ("--box-threshold", "0.3", "--text-threshold", "0.25", "--keep", "best", "--on-empty", "whole")
LEAST_COSINE = 0.9995
QUICK_WAYS = ("pillow_draft", "turbojpeg_scaled")
LARGEST_PIXELS = ("--max-pixels", "500000000")
# Of images done, where the memory of a long run is read.
EARLY, LATE = 2_000, 10_000


def dinov2(photos: str, limit: int) -> Work:
    return Work(photos, limit, embedder="dinov2-small-onnx", torch_embedder="dinov2-small")


def one_layer(photos: str, limit: int) -> Work:
    return Work(photos, limit, embedder="one-layer")


def detect_embed(bench: Bench) -> None:
    work = replace(
        dinov2("mix", bench.count(64, 4)),
        detector="grounding-dino-tiny-onnx",
        torch_detector="grounding-dino-tiny",
        flags=ONE_REGION,
    )
    mine = bench.compare("detect-embed", work, [STRONG, LOADER, NAIVE])
    bench.add_efficiency("detect-embed", work, mine)
    bench.add_memory("detect-embed/memory_512", work)


def video(bench: Bench) -> None:
    work = Work("video", bench.count(795, 40), embedder="efficientnet-lite0", detector="yolov3-tiny")
    mine = bench.compare("video", work, [STRONG])
    bench.add_efficiency("video", work, mine)
    bench.add_memory("video/memory_512", work)


def large(bench: Bench) -> None:
    work = dinov2("large", bench.count(64, 8))
    mine = bench.compare("large", work, [STRONG, LOADER])
    bench.add_efficiency("large", work, mine)
    bench.add_memory("large/memory_512", work)


def web(bench: Bench) -> None:
    work = dinov2("web", bench.count(600, 16))
    mine = bench.compare("web", work, [STRONG, LOADER])
    bench.add_efficiency("web", work, mine)
    bench.add_memory("web/memory_512", work)


def decode(bench: Bench) -> None:
    """A model that costs next to nothing, so that decoding and resizing are what is seen."""
    add_cosine(bench)
    for photos, full, quick in (("twelve", 56, 8), ("mix", 400, 40)):
        work = one_layer(photos, bench.count(full, quick))
        bench.warm(work.photos, work.limit)
        bench.croprow.one_image(work)
        best = best_way(bench, work)
        costs = bench.rounds(
            {
                "croprow": lambda: bench.croprow.run(work),
                best: lambda: bench.peers.preprocess(best, work.photos, work.limit),
                LOADER: lambda: bench.peers.run(LOADER, work),
            }
        )
        mine = costs["croprow"]
        bench.add_memory(f"decode/{photos}_memory_512", work)
        bench.add_ratio(f"decode/{photos}_best_way", f"{best}, preprocessing alone ({photos})", mine, costs[best])
        bench.add_ratio(
            f"decode/{photos}_{LOADER}", f"DataLoader + transformers, the same embedder ({photos})", mine, costs[LOADER]
        )  # fmt: skip


def add_cosine(bench: Bench) -> None:
    """croprow's vectors against those of the Hugging Face path, on the photos that prepare.sh compared ways on."""
    photos = bench.count(60, 12)
    bench.croprow.run(dinov2("mix", photos))
    cosine = bench.peers.cosine_of(bench.croprow.database())
    bench.figures.add(
        "decode/cosine", "least cosine of vectors to the Hugging Face path", "cosine", [cosine["least_cosine"]],
        f"{cosine['photos']} photos",
    )  # fmt: skip


def best_way(bench: Bench, work: Work) -> str:
    """Each way once, its speed as a figure; returns the fastest of those that are near enough to the reference."""
    speeds: dict[str, float] = {}
    for way, cosine in bench.peers.ways().items():
        if bench.quick and way not in QUICK_WAYS:
            continue
        try:
            cost = bench.peers.preprocess(way, work.photos, bench.count(work.limit, 8))
        except program.ProgramFailed as error:
            print(f"  {way} left out: {error}", file=sys.stderr)
            continue
        counts = cosine >= LEAST_COSINE
        if counts:
            speeds[way] = cost.images_per_s
        note = f"cosine {cosine:.6f}" + ("" if counts else ": too far from the reference to count")
        what = f"preprocessing alone, {way} ({work.photos})"
        bench.figures.add(f"decode/{work.photos}_way_{way}", what, "images/s", [cost.images_per_s], note)
    return max(speeds, key=lambda way: speeds[way])


def memory(bench: Bench) -> None:
    """croprow alone, told to keep 512 MiB for images; what its memory rises to over a run with one small photo."""
    baseline = bench.croprow.one_image(one_layer("web", 1), MEMORY).peak_bytes
    sets = (("mp24", bench.count(64, 8), "24 megapixels each"), ("mp400", 1, "one of 400 megapixels"))
    for photos, limit, what in sets:
        bench.warm(photos, limit)
        runs = [
            bench.croprow.start(one_layer(photos, limit), limit, (*MEMORY, *LARGEST_PIXELS))
            for _ in range(min(bench.pairs, 3))
        ]
        over = [(run.peak_bytes - baseline) / MIB for run in runs]
        done = min(run.json_line()["done"] for run in runs)
        note = f"{done} of {limit} photos done; {baseline / MIB:.0f} MiB with one small photo"
        bench.figures.add(f"memory/{photos}", f"memory over the models', {what}", "MiB", over, note)
    many_shapes(bench)


def many_shapes(bench: Bench) -> None:
    """A detector whose input follows the photo's shape, on 500 shapes, and the memory of a long run."""
    limit = bench.count(10_000, 100)
    work = replace(
        one_layer("shapes", limit), detector="grounding-dino-small-input", flags=(*ONE_REGION, *MEMORY)
    )  # fmt: skip
    bench.warm("shapes", limit)
    baseline = bench.croprow.one_image(work).peak_bytes
    cost = bench.croprow.run(work)
    note = f"{limit} photos; {baseline / MIB:.0f} MiB with one"
    what = "memory over one photo's, 500 shapes"
    bench.figures.add("memory/shapes", what, "MiB", [(cost.peak_bytes - baseline) / MIB], note)
    early, late = (resident_bytes(bench, min(done, limit)) for done in (EARLY, LATE))
    if early and late and limit >= LATE:
        note = f"{early / MIB:.0f} and {late / MIB:.0f} MiB"
        growth = 100 * (late - early) / early
        bench.figures.add("memory/shapes_growth", f"memory from {EARLY} to {LATE} photos", "%", [growth], note)


def resident_bytes(bench: Bench, done: int) -> float | None:
    """Median of the three samples around so many finished images."""
    near = f"SELECT rss_bytes FROM samples ORDER BY abs(done - {done}) LIMIT 3"
    samples = [row[0] for row in bench.croprow.ask(near)]
    return statistics.median(samples) if samples else None


def database(bench: Bench) -> None:
    """The queue without models: needs the project's example of that name."""
    command = example("database")
    if not command:
        print("  left out: target/release/examples/database is not built", file=sys.stderr)
        return
    images = bench.count(100_000, 5_000)
    place = bench.croprow.places.scratch
    speeds, cpu = [], []
    for _ in range(bench.pairs):
        line = program.run([*command, "--images", str(images), "--dir", str(place)], place / "database.log").json_line()
        speeds.append(line["images"] / line["seconds"])
        cpu.append(1e6 * line["cpu_seconds"] / line["images"])
    note = f"{images} images, {statistics.median(cpu):.0f} µs of CPU time an image"
    bench.figures.add("database/images_per_s", "images through the queue, models faked", "images/s", speeds, note)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "detect-embed": detect_embed,
    "video": video,
    "large": large,
    "web": web,
    "decode": decode,
    "memory": memory,
    "database": database,
}
