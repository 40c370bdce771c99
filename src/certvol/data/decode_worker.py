"""Decode images for the parent process: `python -m certvol.data.decode_worker PARENT_ID`.

decode_pool.py is the other end. It sends a line of JSON with settings, then one for each file. The
answer is a line of JSON, followed by the pixels of a readable image.
"""

import json
import os
import signal
import sys
import threading
import time

from PIL import ImageFile

from certvol.data.decoding import LargeImage, ReadImage, pillow_settings, read_image
from certvol.data.folders import ListedFile
from certvol.errors import RunFailed

HELLO = b"certvol decodes\n"
_PARENT_CHECK_SECONDS = 2.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process when an image's time is up
    threading.Thread(target=_exit_with, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a codec must not mix with the answers
    answers.write(HELLO)
    answers.flush()
    settings = json.loads(sys.stdin.buffer.readline())
    size, max_megapixels, seconds, ImageFile.LOAD_TRUNCATED_IMAGES = settings
    with pillow_settings(max_megapixels):
        for line in sys.stdin.buffer:
            image, large, failed = ReadImage(None, None), False, ""
            file, alone = json.loads(line)
            # Processor time, because the time on the clock depends on the load.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                image = read_image(ListedFile(*file), size, max_megapixels, alone)
            except LargeImage:
                large = True
            except RunFailed as error:
                failed = str(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer = {
                "large": large,
                "failed": failed,
                "digest": (image.digest or b"").hex(),
                "has_pixels": image.pixels is not None,
                "reason": image.reason,
                "lasting": image.lasting,
            }
            answers.write(json.dumps(answer).encode() + b"\n")
            if image.pixels is not None:
                answers.write(image.pixels.data)
            answers.flush()


def _exit_with(parent: int) -> None:
    """End this process with its parent, even if a fork of the parent keeps the pipes open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
