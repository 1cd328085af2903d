"""examples/unet/serve over HTTP, in a browser where there is one, and what it refuses."""

import base64
import io
import json
import shutil
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from examples.errors import ExampleError
from examples.unet.runner import Segmentation
from examples.unet.serve import Page, decode, painted, palette

NAMES = ("background", "cell", "dust")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Bright:
    """A runner whose classes are how bright a pixel is; it can be made to wait."""

    artifact = SimpleNamespace(
        description=SimpleNamespace(
            network="thresholds", precision="uint8", channels=3, classes=NAMES
        )
    )

    def __init__(self):
        self.go = threading.Event()
        self.go.set()

    def segment(self, image, stages):
        with stages.time("network"):
            self.go.wait(10)
            classes = (image.mean(axis=-1) // 86).astype(np.uint8)
        return Segmentation(classes, np.full_like(classes, 255))


@pytest.fixture(scope="module")
def server():
    uvicorn = pytest.importorskip("uvicorn", reason="it is in the extra lm")
    pytest.importorskip("starlette", reason="it is in the extra lm")
    runner = Bright()
    page = Page(runner, most_pixels=100_000, waiting=1)
    server = uvicorn.Server(uvicorn.Config(page.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield SimpleNamespace(port=port, url=f"http://127.0.0.1:{port}", runner=runner)
    server.should_exit = True
    thread.join(10)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


def steps():
    """An image of three grey stripes of 10 columns each."""
    columns = np.repeat(np.array([0, 100, 200], np.uint8), 10)
    return np.broadcast_to(columns[None, :, None], (20, 30, 3)).copy()


def post(server, body, **headers):
    request = urllib.request.Request(f"{server.url}/segment", body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def picture(url):
    return Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1])))


def bomb(width, height):
    """A PNG of a few bytes whose header promises many pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data


def test_an_image_goes_in_and_its_mask_comes_out(server):
    for kind in ("PNG", "BMP", "WEBP"):
        options = dict(lossless=True) if kind == "WEBP" else {}
        status, answer = post(server, encoded(steps(), kind, **options))
        assert status == 200 and (answer["width"], answer["height"]) == (30, 20)
        np.testing.assert_array_equal(picture(answer["mask"]), steps()[..., 0] // 86)
        assert [c["name"] for c in answer["classes"]] == list(NAMES)
        assert all(abs(c["share"] - 1 / 3) < 1e-9 for c in answer["classes"])
        assert picture(answer["picture"]).size == (30, 20)
        assert {"decode", "network", "paint"} <= set(answer["milliseconds"])
    with urllib.request.urlopen(server.url, timeout=30) as response:
        assert b"<title>Segmentation</title>" in response.read()
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as response:
        assert json.load(response)["inside"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body must be an image's file, but is empty; send one."),
        (b"GIF89a", "must be a readable image (PNG, JPEG, WEBP, BMP, GIF, TIFF), but is not"),
        (b"%PDF-1.4 hello", "(cannot identify image file); send another."),
        (encoded(steps())[:60], "must be a readable image"),
        (encoded(steps(), "JPEG")[:400], "must be a readable image"),
        (bomb(9_000, 9_000), "at most 100,000 pixels, but this one has 9000 x 9000"),
        (bomb(60_000, 60_000), "(Image size (3600000000 pixels) exceeds limit"),
        (bomb(4, 4), "must be a readable image"),
    ],
    ids=("empty", "short", "pdf", "cut png", "cut jpeg", "bomb", "larger bomb", "no pixels"),
)
def test_what_is_no_image_gets_a_sentence(server, body, message):
    status, answer = post(server, body)
    assert status == 400 and message in answer["error"]


@pytest.mark.exhaustive
def test_a_form_gets_a_sentence(server):
    form = {"content-type": "multipart/form-data; boundary=b"}
    status, answer = post(server, b"--b--", **form)
    assert status == 400 and "but is a form; send the bytes alone" in answer["error"]


def test_an_upload_that_stops_leaves_the_server_working(server):
    head = b"POST /segment HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    for sent in (head, head + encoded(steps())[:50]):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(sent)
    assert post(server, encoded(steps()))[0] == 200
    assert post(server, b"\0" * (64 * 2**20 + 1))[1]["error"].startswith("a file must have at most")


@pytest.mark.exhaustive
def test_more_images_than_may_wait_are_sent_away(server):
    server.runner.go.clear()
    statuses = []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(server, encoded(steps()))[0]))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(statuses) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    server.runner.go.set()
    for thread in threads:
        thread.join(10)
    assert sorted(statuses) == [200, 200, 429, 429, 429]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server.url}/nowhere", timeout=30)


def test_images_are_turned_upright_and_grey_serves_as_colour():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    turned = decode(encoded(steps(), exif=exif), "RGB", most_pixels=1000)
    assert turned.shape == (30, 20, 3)
    deep = (np.arange(600).reshape(20, 30) * 100).astype(np.uint16)
    np.testing.assert_array_equal(decode(encoded(deep), "L", most_pixels=1000), deep >> 8)
    with pytest.raises(ExampleError, match="at most 599 pixels, but this one has 30 x 20"):
        decode(encoded(steps()), "RGB", most_pixels=599)


@pytest.mark.exhaustive
def test_colours_are_those_of_pascal_voc():
    colours = palette(21)
    assert colours[[0, 1, 2, 15, 20]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128],
    ]  # fmt: skip
    shown = np.asarray(painted(steps(), steps()[..., 0] // 86, palette(3)))
    assert (shown[:, :10] == 0).all() and (shown[:, 10:20, 0] > shown[:, 10:20, 1]).all()


@pytest.mark.exhaustive
def test_a_browser_shows_the_mask(server, tmp_path):
    """Chromium loads the page, a script hands it an image, and the table of stages is read back."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("there is no chromium; `apt-get install chromium` brings one")
    image = base64.b64encode(encoded(steps())).decode()
    script = f"""
      const bytes = Uint8Array.from(atob("{image}"), c => c.charCodeAt(0));
      const chosen = new DataTransfer();
      chosen.items.add(new File([bytes], "steps.png", {{type: "image/png"}}));
      addEventListener("load", () => {{
        const input = document.getElementById("file");
        input.files = chosen.files;
        input.dispatchEvent(new Event("change"));
      }});
    """
    with urllib.request.urlopen(server.url, timeout=30) as response:
        page = response.read().decode()
    served = page.replace('fetch("segment"', f'fetch("{server.url}/segment"')
    path = tmp_path / "page.html"
    path.write_text(served.replace("</html>", f"<script>{script}</script></html>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security"]
    flags += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [browser, *flags, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "30 x 20 pixels" in done.stdout, done.stderr[-2000:]
    for text in (*NAMES, "33.3 %", "decode", "network", "paint", "together"):
        assert text in done.stdout
    assert 'src="data:image/jpeg;base64,' in done.stdout
