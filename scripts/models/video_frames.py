"""Write every frame of a video as a JPEG file: frame_0000.jpg, frame_0001.jpg, ...

Frames keep the video's size. Needs opencv-python-headless, which brings its own decoders.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2


def write_frames(video: Path, folder: Path, quality: int) -> int:
    """Gives the number of frames written. `folder` must exist."""
    capture = cv2.VideoCapture(str(video))
    if not capture.isOpened():
        raise SystemExit(f"{video}: not a video that OpenCV can read")
    count = 0
    while True:
        there_is_one, frame = capture.read()
        if not there_is_one:
            return count
        path = folder / f"frame_{count:04d}.jpg"
        if not cv2.imwrite(str(path), frame, [cv2.IMWRITE_JPEG_QUALITY, quality]):
            raise SystemExit(f"{path}: could not be written")
        count += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Write every frame of a video as a JPEG file.")
    parser.add_argument("video", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quality", type=int, default=95, help="JPEG quality, 1 to 100 (95)")
    parser.add_argument("--expect", type=int, help="fail unless the video has this many frames")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    count = write_frames(args.video, args.folder, args.quality)
    # OpenCV ends a damaged video early without an error.
    if args.expect is not None and count != args.expect:
        raise SystemExit(f"{args.video}: {count} frames, expected {args.expect}")


if __name__ == "__main__":
    main()
