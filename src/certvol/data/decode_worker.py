"""Decodes images for the process that started it: see decode_processes.py. `python -m certvol.data.decode_worker PARENT`"""

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from certvol.data.decode_processes import HELLO
from certvol.data.decoding import LargeImage, decode, pillow_settings
from certvol.data.reading import read_image
from certvol.errors import RunFailed

_LOOK_SECONDS = 2.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but it is our parent's to act on
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a codec prints must not come between the answers
    _send(answers, [HELLO])
    requests = sys.stdin.buffer
    if settings := requests.readline():
        _serve(json.loads(settings), requests, answers)


def _serve(settings: dict[str, Any], requests: Any, answers: int) -> None:
    ImageFile.LOAD_TRUNCATED_IMAGES = settings["load_truncated"]
    Image.MAX_IMAGE_PIXELS = settings["max_image_pixels"]
    with pillow_settings(settings["max_megapixels"]):
        for line in requests:
            _send(answers, _answer(json.loads(line), settings))


def _answer(files: list[list[Any]], settings: dict[str, Any]) -> list[Any]:
    """The parts of an answer: a line about each file, then the pixels."""
    limit = settings["max_megapixels"]
    root = _path(settings["root"])
    pixels_of = functools.partial(decode, size=settings["size"], max_megapixels=limit, take_large=False)
    rows: list[list[Any]] = []
    pixels: list[npt.NDArray[np.uint8]] = []
    for path, *listed in files:
        try:
            image = read_image(root / _path(path), (listed[0], listed[1]), limit, pixels_of)
        except LargeImage:
            rows.append([None, False, "", False, True])
            continue
        except RunFailed as error:
            return [json.dumps({"failed": str(error)}).encode() + b"\n"]
        digest = None if image.digest is None else image.digest.hex()
        rows.append([digest, image.pixels is not None, image.reason, image.lasting, False])
        if image.pixels is not None:
            pixels.append(image.pixels)
    return [json.dumps({"images": rows}).encode() + b"\n", *(array.data.cast("B") for array in pixels)]


def _path(text: str) -> Path:
    return Path(os.fsdecode(text.encode("latin-1")))


def _send(file: int, parts: list[Any]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        written = os.writev(file, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, also where a fork of the parent keeps the pipes open."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
