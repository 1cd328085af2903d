"""A web page that segments images: `python -m examples.unet.serve FILE`, `--help` for the flags.

FILE is one of examples.unet.export. The page takes an image and shows its mask over it, the share of
each class, and the milliseconds of each stage. `POST /segment` with a file's bytes as the body is the
same for programs: JSON with the mask as a PNG.
"""

import argparse
import asyncio
import base64
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageOps

from examples.errors import ExampleError, run_command
from examples.flags import whole
from examples.images import in_mode
from examples.listening import listen, serve, url_of
from examples.packages import needed
from examples.unet.runner import Runner, Segmentation, Stages
from examples.unet.segment import add_flags, open_runner
from examples.uploads import body_of

_PAGE = Path(__file__).parent / "page.html"
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_LARGEST_BODY = 64 * 2**20
_SHOWN = 1280
"""Pixels of the longer side of the displayed picture; the mask keeps its size."""


class Page:
    """The routes, as an ASGI application: `Page(...).app`.

    Args:
      runner: segments the images.
      most_pixels: largest number of pixels of an image; a larger one is refused before it is decoded.
      waiting: images that may wait while another is segmented; further ones are answered by status 429.
    """

    def __init__(self, runner: Runner, *, most_pixels: int = 2**26, waiting: int = 16):
        routing, applications = needed("starlette.routing"), needed("starlette.applications")
        self._responses = needed("starlette.responses")
        self._runner, self._most_pixels = runner, most_pixels
        self._waiting, self._inside = waiting, 0
        self._device = asyncio.Lock()
        route = routing.Route
        self.app = applications.Starlette(
            routes=[
                route("/", self.page),
                route("/segment", self.segment, methods=["POST"]),
                route("/health", self.health),
            ],
            exception_handlers={404: self._no_route, 405: self._no_route},
        )

    async def page(self, request: Any) -> Any:
        return self._responses.HTMLResponse(_PAGE.read_text())

    async def health(self, request: Any) -> Any:
        described = self._runner.artifact.description
        return self._responses.JSONResponse(
            dict(network=described.network, precision=described.precision, inside=self._inside)
        )

    async def segment(self, request: Any) -> Any:
        if self._inside > self._waiting:
            return self._error(429, f"{self._waiting} images are waiting; try again in a second.")
        self._inside += 1
        stages = Stages()
        in_thread = needed("starlette.concurrency").run_in_threadpool
        try:
            body = await _upload(request)
            image = await in_thread(self._decoded, body, stages)
            async with self._device:
                found = await in_thread(self._runner.segment, image, stages)
            return self._responses.JSONResponse(await in_thread(self._shown, image, found, stages))
        except ExampleError as error:
            return self._error(400, str(error))
        finally:
            self._inside -= 1

    def _decoded(self, body: bytes, stages: Stages) -> np.ndarray:
        channels = self._runner.artifact.description.channels
        with stages.time("decode"):
            image = decode(body, "L" if channels == 1 else "RGB", most_pixels=self._most_pixels)
        return image.reshape(*image.shape[:2], channels)

    def _shown(self, image: np.ndarray, found: Segmentation, stages: Stages) -> dict[str, Any]:
        names = self._runner.artifact.description.classes
        counts = np.bincount(found.classes.ravel(), minlength=len(names))
        with stages.time("paint"):
            colours = palette(len(names))
            pictures = dict(
                picture=_as_url(painted(image, found.classes, colours), "JPEG"),
                mask=_as_url(_indexed(found.classes, colours), "PNG"),
            )
        classes = [
            dict(name=name, share=float(count / counts.sum()), colour="#" + bytes(rgb).hex())
            for name, count, rgb in zip(names, counts, colours, strict=True)
            if count
        ]
        milliseconds = {name: 1000 * value for name, value in stages.seconds.items()}
        height, width = found.classes.shape
        size = dict(width=width, height=height)
        return dict(**size, classes=classes, milliseconds=milliseconds, **pictures)

    async def _no_route(self, request: Any, error: Any) -> Any:
        return self._error(error.status_code, f"there is no {request.method} {request.url.path}")

    def _error(self, status: int, message: str) -> Any:
        headers = {"retry-after": "1"} if status == 429 else None
        return self._responses.JSONResponse({"error": message}, status, headers=headers)


async def _upload(request: Any) -> bytes:
    """Returns the body of a request.

    Raises:
      ExampleError: the body is a form, empty, too large, or incomplete.
    """
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise ExampleError(
            "the body must be an image's file, but is a form; send the bytes alone, as curl's"
            " --data-binary does."
        )
    data = await body_of(request, "file", _LARGEST_BODY)
    if not data:
        raise ExampleError("the body must be an image's file, but is empty; send one.")
    return data


def decode(body: bytes, mode: str, *, most_pixels: int) -> np.ndarray:
    """Returns the upright image of a file's bytes, in the Pillow mode "L" or "RGB".

    The size is read from the file's header, before memory for pixels is allocated.

    Raises:
      ExampleError: the bytes are no image of a known format, are broken, or hold too many pixels.
    """
    file = io.BytesIO(body)
    try:
        with Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise ExampleError(
                    f"an image must have at most {most_pixels:,} pixels, but this one has {width} x"
                    f" {height}; send a smaller one."
                )
            return np.asarray(in_mode(ImageOps.exif_transpose(image), mode))
    except ExampleError:
        raise
    # Pillow raises SyntaxError, ValueError, struct.error and others for broken files.
    except Exception as error:
        reason = " ".join(str(error).split()).replace(f" {file!r}", "")[:200]
        raise ExampleError(
            f"the file must be a readable image ({', '.join(_FORMATS)}), but is not ({reason}); send"
            " another."
        ) from error


def palette(count: int) -> np.ndarray:
    """Returns a colour for each class, uint8 [count, 3], black for the first.

    The colours are those of Pascal VOC: bits 0, 1, 2 of a class number are the highest bits of red,
    green and blue, bits 3, 4, 5 the next, and so on.
    """
    numbers = np.arange(count)[:, None]
    colours = np.zeros((count, 3), np.uint8)
    for bit in range(8):
        colours |= (((numbers >> (3 * bit + np.arange(3))) & 1) << (7 - bit)).astype(np.uint8)
    return colours


def painted(image: np.ndarray, classes: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Returns the image overlaid with the colours of its classes, except the first class's."""
    base = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).convert("RGB")
    mask = _indexed(classes, colours)
    scale = min(_SHOWN / max(base.size), 1)
    size = tuple(max(1, round(side * scale)) for side in base.size)
    base, mask = base.resize(size), mask.resize(size, Image.Resampling.NEAREST)
    strength = Image.fromarray(np.where(np.asarray(mask) > 0, 150, 0).astype(np.uint8))
    return Image.composite(mask.convert("RGB"), base, strength)


def _indexed(classes: np.ndarray, colours: np.ndarray) -> Image.Image:
    image = Image.fromarray(classes).convert("L")
    image.putpalette(colours.tobytes())
    return image


def _as_url(image: Image.Image, kind: str) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{encoded}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=whole(0, most=65535), default=8000, help="(%(default)s)")
    parser.add_argument(
        "--most-pixels",
        type=whole(1),
        default=2**26,
        metavar="N",
        help="of an image; larger ones are refused (%(default)s)",
    )
    parser.add_argument(
        "--queue", type=whole(0), default=16, metavar="N", help="images in line (%(default)s)"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    needed("uvicorn")
    listener = listen(args.host, args.port)
    runner = open_runner(args)
    runner.warm()
    page = Page(runner, most_pixels=args.most_pixels, waiting=args.queue)
    described = runner.artifact.description
    print(
        f"{described.network} in {described.precision} on {jax.devices()[0].device_kind} at"
        f" {url_of(listener)}",
        file=sys.stderr,
        flush=True,
    )
    serve(page.app, listener)


if __name__ == "__main__":
    run_command(main)
