"""Two chains of augmentation from uint8 images to bfloat16, forward, with random draws as inputs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

from benchmarks.run.case import (
    BEST_PEER,
    ONE_DRAW,
    Arrays,
    Bar,
    Case,
    functions,
    torch_compiled,
)
from jaxfused import augment
from jaxfused.augment.transform import Drawn

Shape = tuple[int, ...]
WARP, CROP = "affine, brightness, contrast, normalize", "crop, flip, saturation, hue, blur"
SHAPES: dict[str, Shape] = {WARP: (256, 224, 224, 3), CROP: (256, 256, 256, 3)}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, BLUR = 224, 5
_BARS = {
    WARP: (Bar("torch_compile", must=3.0, aim=5.0),),
    CROP: (Bar(BEST_PEER, must=5.0),),
}


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    del quick
    return [_case(name, shape) for name in SHAPES for shape in shapes or (SHAPES[name],)]


def _case(name: str, shape: Shape) -> Case:
    ours, xla, torch, library, kornia, inputs = _CHAINS[name]
    count = shape[0]
    size = shape[1] * shape[2] if name == WARP else SIZE * SIZE
    # Contrast reads the images twice; the blur's pass reads and writes one more byte per value.
    moved = 2 * shape[1] * shape[2] + 2 * size if name == WARP else shape[1] * shape[2] + 4 * size
    return Case(
        name=name,
        shape=shape,
        make_inputs=partial(inputs, shape),
        bytes=3 * count * moved,
        bars=_BARS[name] if shape == SHAPES[name] else (),
        error_limit=3e-2,
        **functions(
            ours,
            {"xla": xla},
            {
                "torch_compile": partial(torch_compiled, torch),
                "kornia": partial(torch_compiled, kornia),
                ONE_DRAW: partial(_one_draw, library),
            },
            differentiable=0,
            cotangents=0,
        ),
    )


def _uniform(key: jax.Array, count: int, low: float, high: float) -> jax.Array:
    return jax.random.uniform(key, (count,), jnp.float32, low, high)


def _images(key: jax.Array, shape: Shape) -> jax.Array:
    """Returns smooth images with some noise, so that a small error of a position changes little."""
    base, noise = jax.random.split(key)
    small = jax.random.uniform(base, (shape[0], 8, 8, shape[3]))
    levels = 255 * jax.image.resize(small, shape, "bilinear")
    levels += jax.random.uniform(noise, shape, minval=-8, maxval=8)
    return jnp.clip(levels, 0, 255).astype(jnp.uint8)


def _one_draw(transform: Callable) -> Callable:
    """Returns a function that transforms all images by the first's draws, copied to the host once."""
    read: list[list] = []

    def run(images, *draws):
        if not read:
            read.extend(draw[0].tolist() for draw in draws)
        return transform(images.movedim(-1, 1), *read).movedim(1, -1)

    return run


def _on(values: Any, count: int) -> Drawn:
    return Drawn(jnp.ones((count,), bool), values)


# --- affine, brightness, contrast, normalize ------------------------------------------------------


def _warp_inputs(shape: Shape, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 5)
    ranges = ((-20.0, 20.0), (0.8, 1.2), (0.6, 1.4), (0.6, 1.4))
    drawn = [_uniform(k, shape[0], *r) for k, r in zip(keys[1:], ranges, strict=True)]
    return _images(keys[0], shape), *drawn


def _warp(images, degrees, scale, brightness, contrast, *, implementation):
    chain = augment.Chain(
        augment.RandomAffine(20, scale=(0.8, 1.2)),
        augment.ColorJitter(0.4, 0.4, order="fixed"),
        augment.Normalize(MEAN, STD),
        dtype=jnp.bfloat16,
        implementation=implementation,
    )
    zero, count = jnp.zeros_like(degrees), len(images)
    warp = dict(degrees=degrees, x=zero, y=zero, scale=scale, across=zero, down=zero)
    order = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (count, 2))
    jitter = dict(order=order, amounts=jnp.stack([brightness, contrast], 1))
    return chain.apply((_on(warp, count), _on(jitter, count), _on((), count)), images)


def _warp_xla(images, degrees, scale, brightness, contrast):
    """Computes the warp chain as a JAX user writes it."""

    def one(image, degrees, scale, brightness, contrast):
        height, width, _ = image.shape
        y, x = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
        y, x = y - (height - 1) / 2, x - (width - 1) / 2
        s, c = jnp.sin(jnp.deg2rad(degrees)), jnp.cos(jnp.deg2rad(degrees))
        places = [
            (s * x + c * y) / scale + (height - 1) / 2,
            (c * x - s * y) / scale + (width - 1) / 2,
        ]
        planes = jnp.moveaxis(image.astype(jnp.float32) / 255, -1, 0)
        moved = jax.vmap(lambda plane: map_coordinates(plane, places, 1))(planes)
        v = jnp.clip(brightness * jnp.moveaxis(moved, 0, -1), 0, 1)
        mean = (v * jnp.array([0.299, 0.587, 0.114])).sum(-1).mean()
        v = jnp.clip(contrast * v + (1 - contrast) * mean, 0, 1)
        return ((v - jnp.array(MEAN)) / jnp.array(STD)).astype(jnp.bfloat16)

    return jax.vmap(one)(images, degrees, scale, brightness, contrast)


def _warp_torch(images, degrees, scale, brightness, contrast):
    import torch
    from torch.nn import functional

    angles = torch.deg2rad(degrees)
    s, c, zero = torch.sin(angles) / scale, torch.cos(angles) / scale, torch.zeros_like(degrees)
    rows = [torch.stack([c, -s, zero], -1), torch.stack([s, c, zero], -1)]
    x = images.movedim(-1, 1).float() / 255
    grid = functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    x = functional.grid_sample(x, grid, align_corners=False)
    x = (brightness[:, None, None, None] * x).clamp(0, 1)
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]
    mean = (x * weights).sum(1).mean((1, 2))[:, None, None, None]
    share = contrast[:, None, None, None]
    x = (share * x + (1 - share) * mean).clamp(0, 1)
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (MEAN, STD))
    return ((x - mean) / std).bfloat16().movedim(1, -1)


def _warp_torchvision(x, degrees, scale, brightness, contrast):
    import torch
    from torchvision.transforms.v2 import InterpolationMode, functional

    x = functional.affine(x, -degrees, [0, 0], scale, [0.0], InterpolationMode.BILINEAR)
    x = functional.adjust_contrast(functional.adjust_brightness(x, brightness), contrast)
    x = functional.to_dtype(x, torch.float32, scale=True)
    return functional.normalize(x, list(MEAN), list(STD)).bfloat16()


def _warp_kornia(images, degrees, scale, brightness, contrast):
    import torch
    from kornia import enhance
    from kornia.geometry import get_rotation_matrix2d, warp_affine

    x = images.movedim(-1, 1).float() / 255
    size = (x.shape[2], x.shape[3])
    center = torch.tensor([(n - 1) / 2 for n in size[::-1]], device=x.device).expand(len(x), 2)
    matrix = get_rotation_matrix2d(center, degrees, scale[:, None].expand(-1, 2))
    x = warp_affine(x, matrix, size, align_corners=True)
    x = enhance.adjust_brightness_accumulative(x, brightness)
    x = enhance.adjust_contrast_with_mean_subtraction(x, contrast)
    mean, std = (torch.tensor(v, device=x.device) for v in (MEAN, STD))
    return enhance.normalize(x, mean, std).bfloat16().movedim(1, -1)


# --- crop, flip, saturation, hue, blur ------------------------------------------------------------


def _crop_inputs(shape: Shape, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 6)
    crop = augment.RandomResizedCrop(SIZE)
    size = jnp.array(shape[1:3], jnp.float32)
    boxes = jax.vmap(lambda k: crop.values(k, size))(jax.random.split(keys[1], shape[0]))
    ranges = ((0.0, 1.0), (0.6, 1.4), (-0.1, 0.1), (0.5, 2.0))
    drawn = [_uniform(k, shape[0], *r) for k, r in zip(keys[2:], ranges, strict=True)]
    return _images(keys[0], shape), boxes, *drawn


def _crop(images, boxes, flip, saturation, hue, sigma, *, implementation):
    chain = augment.Chain(
        augment.RandomResizedCrop(SIZE),
        augment.RandomHorizontalFlip(),
        augment.ColorJitter(saturation=0.4, hue=0.1, order="fixed"),
        augment.GaussianBlur(BLUR),
        dtype=jnp.bfloat16,
        implementation=implementation,
    )
    count = len(images)
    order = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (count, 2))
    jitter = dict(order=order, amounts=jnp.stack([saturation, hue], 1))
    flips = Drawn(flip < 0.5, ())
    return chain.apply((_on(boxes, count), flips, _on(jitter, count), _on(sigma, count)), images)


def _crop_xla(images, boxes, flip, saturation, hue, sigma):
    """Computes the crop chain as a JAX user writes it."""

    def one(image, box, flip, saturation, hue, sigma):
        left, top, width, height = box
        scale = jnp.stack([SIZE / height, SIZE / width])
        start = -jnp.stack([top, left]) * scale
        shape = (SIZE, SIZE, image.shape[-1])
        x = image.astype(jnp.float32) / 255
        x = jax.image.scale_and_translate(x, shape, (0, 1), scale, start, "bilinear")
        x = jnp.where(flip < 0.5, x[:, ::-1], x)
        gray = (x * jnp.array([0.299, 0.587, 0.114])).sum(-1, keepdims=True)
        x = jnp.clip(saturation * x + (1 - saturation) * gray, 0, 1)
        x = _hue(x, hue, jnp)
        places = jnp.arange(-(BLUR // 2), BLUR // 2 + 1)
        weights = jnp.exp(-0.5 * (places / sigma) ** 2)
        weights = weights / weights.sum()
        for axis in (0, 1):
            pads = [(BLUR // 2, BLUR // 2) if a == axis else (0, 0) for a in range(3)]
            padded = jnp.pad(x, pads, mode="reflect")
            parts = [jax.lax.slice_in_dim(padded, i, i + SIZE, axis=axis) for i in range(BLUR)]
            x = sum(w * part for w, part in zip(weights, parts, strict=True))
        return x.astype(jnp.bfloat16)

    return jax.vmap(one)(images, boxes, flip, saturation, hue, sigma)


def _hue(x, turns, library):
    """Rotates the hue of colours in the last axis, in jax.numpy or torch."""
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    largest = library.maximum(library.maximum(red, green), blue)
    chroma = largest - library.minimum(library.minimum(red, green), blue)
    divisor = library.where(chroma > 0, chroma, library.ones_like(chroma))
    sixths = library.where(
        (red >= green) & (red >= blue),
        (green - blue) / divisor,
        library.where(green >= blue, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    channels = []
    for n in (5, 3, 1):
        k = (n + sixths + 6 * turns) % 6
        channels.append(largest - chroma * library.clip(library.minimum(k, 4 - k), 0, 1))
    return library.stack(channels, -1)


def _crop_torch(images, boxes, flip, saturation, hue, sigma):
    import torch
    from torch.nn import functional

    count, height, width, channels = images.shape

    def weights(first, length, size, mirrored):
        """Returns antialiased weights [B, SIZE, size] of the pixels of an axis."""
        steps = torch.arange(SIZE, device=images.device) + 0.5
        steps = torch.where(mirrored[:, None], SIZE - steps, steps)
        place = first[:, None] + steps * (length / SIZE)[:, None] - 0.5
        pixel = torch.arange(size, device=images.device)
        distance = (pixel - place[..., None]) / (length / SIZE).clamp(min=1)[:, None, None]
        inside = (pixel >= first[:, None, None]) & (pixel < (first + length)[:, None, None])
        w = (1 - distance.abs()).clamp(min=0) * inside
        return w / w.sum(-1, keepdim=True)

    across = weights(boxes[:, 0], boxes[:, 2], width, flip < 0.5)
    down = weights(boxes[:, 1], boxes[:, 3], height, flip < 0)
    x = images.float() / 255
    x = torch.bmm(down, x.reshape(count, height, -1)).reshape(count, SIZE, width, channels)
    x = torch.matmul(across[:, None], x)
    gray = (x * torch.tensor([0.299, 0.587, 0.114], device=x.device)).sum(-1, keepdim=True)
    share = saturation[:, None, None, None]
    x = (share * x + (1 - share) * gray).clamp(0, 1)
    x = _hue(x, hue[:, None, None], torch).movedim(-1, 1)
    places = torch.arange(-(BLUR // 2), BLUR // 2 + 1, device=x.device)
    kernel = torch.exp(-0.5 * (places / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    edge = BLUR // 2
    for vertical in (True, False):
        pads = (0, 0, edge, edge) if vertical else (edge, edge, 0, 0)
        padded = functional.pad(x, pads, mode="reflect")
        axis = 2 if vertical else 3
        x = sum(kernel[:, i, None, None, None] * padded.narrow(axis, i, SIZE) for i in range(BLUR))
    return x.bfloat16().movedim(1, -1)


def _crop_torchvision(x, box, flip, saturation, hue, sigma):
    import torch
    from torchvision.transforms.v2 import functional

    left, top, width, height = (round(number) for number in box)
    x = functional.resized_crop(x, top, left, height, width, [SIZE, SIZE], antialias=True)
    if flip < 0.5:
        x = functional.horizontal_flip(x)
    x = functional.adjust_hue(functional.adjust_saturation(x, saturation), hue)
    x = functional.gaussian_blur(x, [BLUR, BLUR], [sigma, sigma])
    return functional.to_dtype(x, torch.float32, scale=True).bfloat16()


def _crop_kornia(images, boxes, flip, saturation, hue, sigma):
    import torch
    from kornia import enhance, filters
    from kornia.geometry.transform import crop_and_resize

    x = images.movedim(-1, 1).float() / 255
    left, top, width, height = boxes.T
    right, bottom = left + width - 1, top + height - 1
    left, right = torch.where(flip < 0.5, right, left), torch.where(flip < 0.5, left, right)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    corners = torch.stack([torch.stack(corner, -1) for corner in corners], 1)
    x = crop_and_resize(x, corners, (SIZE, SIZE), align_corners=True)
    x = enhance.adjust_hue(
        enhance.adjust_saturation_with_gray_subtraction(x, saturation), 2 * torch.pi * hue
    )
    x = filters.gaussian_blur2d(x, (BLUR, BLUR), sigma[:, None].expand(-1, 2))
    return x.bfloat16().movedim(1, -1)


_CHAINS: dict[str, tuple[Callable, ...]] = {
    WARP: (_warp, _warp_xla, _warp_torch, _warp_torchvision, _warp_kornia, _warp_inputs),
    CROP: (_crop, _crop_xla, _crop_torch, _crop_torchvision, _crop_kornia, _crop_inputs),
}
