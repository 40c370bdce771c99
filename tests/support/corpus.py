"""Write a folder of images with everything wrong that such a folder can have."""

import io
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

INJECTED = (
    b" \ncertvol: all is well\x1b[31m.jpg"  # sorts first, so it is the one that messages name
)
NAMES = (
    b"with space .png",
    b"quote'\"`.png",
    b"new\nline.png",
    b"tab\there.png",
    b"escape\x1b[2J.png",
    b"comma,semicolon;.png",
    b"back\\slash.png",
    b"[0-9]*?.png",
    b"%s%n{0}$HOME.png",
    b"-rf.png",
    b"=1+1.png",
    b"+1.png",
    b"@SUM(1).png",
    b"\tfirst.png",
    "é.png".encode(),  # one name in both normal forms
    "e\u0301.png".encode(),
    "日本\u202egnp.png".encode(),
    b"caf\xe9.png",  # not UTF-8
    b"\xff\xfe.png",
    b"\xed\xa0\x80.png",  # a surrogate, encoded like UTF-8
    b"n" * 251 + b".png",
    b"UPPER.PNG",
    b"upper.png",
)


@dataclass
class Corpus:
    """The files of the folder, by what should become of them; paths below `root` as bytes."""

    root: Path
    readable: set[bytes] = field(default_factory=set)
    unreadable: set[bytes] = field(default_factory=set)
    empty: set[bytes] = field(default_factory=set)
    passed_over: int = 0
    """Files without an image suffix."""

    @property
    def skipped(self) -> int:
        return len(self.unreadable) + len(self.empty)

    def path(self, name: bytes) -> str:
        return os.fsdecode(os.fsencode(self.root) + b"/" + name)

    def good(self, name: bytes, content: bytes) -> None:
        self._write(name, content)
        self.readable.add(name)

    def bad(self, name: bytes, content: bytes) -> None:
        self._write(name, content)
        (self.unreadable if content else self.empty).add(name)

    def _write(self, name: bytes, content: bytes) -> None:
        path = Path(self.path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def link(self, name: bytes, to: str | Path, readable: bool = False) -> None:
        Path(self.path(name)).symlink_to(to)
        (self.readable if readable else self.unreadable).add(name)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


class Pictures:
    """Noise images; all differ."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, width: int = 12, height: int = 12) -> Image.Image:
        return Image.fromarray(self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def png(self) -> bytes:
        return encoded(self(), "PNG")


def bomb(side: int = 60_000) -> bytes:
    """Return a PNG of 100 bytes that claims `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + parts


def fill_with_formats(corpus: Corpus, picture: Pictures) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture() for _ in range(3)]
    wide = picture.rng.integers(0, 65536, (12, 12), dtype=np.uint16)
    for name, content in {
        "cmyk.jpg": encoded(picture().convert("CMYK"), "JPEG"),
        "cmyk.tif": encoded(picture().convert("CMYK"), "TIFF"),
        "sixteen.png": encoded(Image.fromarray(wide), "PNG"),
        "sixteen.tif": encoded(Image.fromarray(wide + np.uint16(1)), "TIFF"),
        "palette.gif": encoded(picture().convert("P"), "GIF"),
        "alpha.png": encoded(picture().convert("RGBA"), "PNG"),
        "one bit.png": encoded(picture().convert("1"), "PNG"),
        "moving.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "moving.webp": encoded(frames[1], "WEBP", save_all=True, append_images=frames[:1]),
        "moving.apng": encoded(frames[2], "PNG", save_all=True, append_images=frames[:2]),
        "turned.jpg": encoded(picture(20, 12), "JPEG", exif=exif),
        "one pixel.png": encoded(picture(1, 1), "PNG"),
        "long.png": encoded(picture(20_000, 1), "PNG"),
        "tall.jpg": encoded(picture(1, 20_000), "JPEG"),
        "no profile.jpg": encoded(picture(), "JPEG", icc_profile=b"this is no colour profile" * 9),
        "no profile.png": encoded(picture(), "PNG", icc_profile=b"\xff" * 200),
        "really a png.jpg": picture.png(),
        "really a jpeg.png": encoded(picture(), "JPEG"),
    }.items():
        corpus.good(f"formats/{name}".encode(), content)
    whole = {
        kind: encoded(picture(64, 64), kind)
        for kind in ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
    }
    for kind, content in whole.items():
        corpus.bad(f"damaged/half.{kind.lower()}".encode(), content[: len(content) // 2])
        corpus.bad(f"damaged/start.{kind.lower()}".encode(), content[:5])
    corpus.bad(b"damaged/zero.jpg", b"")
    corpus.bad(b"damaged/zero.png", b"")
    corpus.bad(b"damaged/text.jpg", b"Dear all,\nplease find the image attached.\n")
    corpus.bad(b"damaged/page.png", b"<html><body>404 Not Found</body></html>")
    corpus.bad(b"damaged/vector.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    corpus.bad(b"damaged/program.gif", b"\x7fELF" + bytes(200))
    corpus.bad(
        b"damaged/postscript.tif", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"
    )
    corpus.bad(b"damaged/bomb.png", bomb())


def fill_with_names(corpus: Corpus, picture: Pictures) -> None:
    for name in NAMES:
        corpus.good(b"names/" + name, picture.png())
    corpus.good(b"deep/" + b"/".join([b"d" * 100] * 8) + b"/x.png", picture.png())
    corpus.bad(INJECTED, b"no image")
    corpus.bad(b"names/b\xe9d.jpg", b"no image")


def fill_with_links_and_devices(corpus: Corpus, picture: Pictures, outside: Path) -> None:
    outside.mkdir()
    (outside / "away.png").write_bytes(picture.png())
    (outside / "far.png").write_bytes(picture.png())
    corpus.good(b"links/real.png", picture.png())
    corpus.link(b"links/out.png", outside / "away.png", readable=True)
    Path(corpus.path(b"links/folder out")).symlink_to(outside)
    corpus.readable |= {b"links/folder out/away.png", b"links/folder out/far.png"}
    corpus.link(b"links/loop", corpus.root)
    corpus.link(b"links/above", corpus.root.parent)
    corpus.link(b"links/itself.png", corpus.path(b"links/itself.png"))
    corpus.link(b"links/nowhere.png", outside / "nothing.png")
    corpus.link(b"links/zero.jpg", "/dev/zero")
    corpus.link(b"links/null.jpg", "/dev/null")
    # Claims to have no bytes, but has some.
    Path(corpus.path(b"links/process.jpg")).symlink_to("/proc/self/maps")
    corpus.empty.add(b"links/process.jpg")
    os.mkfifo(corpus.path(b"links/pipe.jpg"))
    corpus.unreadable.add(b"links/pipe.jpg")
    for name in (b"notes.txt", b"labels.csv", b"links/no suffix"):
        Path(corpus.path(name)).write_bytes(b"x")
    corpus.passed_over = 3


def write_corpus(root: Path, seed: int = 0) -> Corpus:
    root.mkdir(parents=True)
    corpus, picture = Corpus(root), Pictures(seed)
    fill_with_formats(corpus, picture)
    fill_with_names(corpus, picture)
    fill_with_links_and_devices(corpus, picture, root.parent / f"{root.name} outside")
    return corpus
