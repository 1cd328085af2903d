"""deform_conv against torchvision's recorded numbers and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.recorded import values
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

ROWS = {name: row for name, row in values.load("resample.npz").items() if name.startswith("deform")}


def last(array):
    return np.moveaxis(array, 1, -1)


def operands(row, shapes):
    """Returns x, w, offset, mask and bias in our layout."""
    x, w, offset, mask = (
        row.input(key, shapes[key]) if key in shapes else None
        for key in ("x", "w", "offset", "mask")
    )
    mask = None if mask is None else last(mask)
    return last(x), w.transpose(2, 3, 1, 0), last(1.5 * offset), mask, row.input("bias", (6,))


@parametrize("name", list(ROWS), quick=[1])
def test_values_and_gradients_are_torchvisions(name):
    row = ROWS[name]
    results = row.results
    shapes = {
        key: results[f"d{key}"].shape
        for key in ("x", "w", "offset", "mask")
        if f"d{key}" in results
    }
    o = row.options
    pair = lambda v: v if isinstance(v, int) else tuple(v)  # noqa: E731
    options = dict(
        strides=pair(o["stride"]),
        padding=pair(o["padding"]),
        kernel_dilation=pair(o["dilation"]),
        feature_group_count=o["groups"],
    )
    arrays = operands(row, shapes)
    dy = last(row.input("dy", results["y"].shape))

    @jax.jit
    def run(*arrays):
        y, pull = jax.vjp(lambda *a: jaxfused.deform_conv(*a, **options), *arrays)
        return y, pull(jnp.asarray(dy))

    y, (dx, dw, doffset, dmask, dbias) = run(*arrays)
    np.testing.assert_allclose(y, last(results["y"]), atol=2e-5)
    np.testing.assert_allclose(dx, last(results["dx"]), atol=4e-5)
    np.testing.assert_allclose(dw, results["dw"].transpose(2, 3, 1, 0), atol=4e-5)
    np.testing.assert_allclose(doffset, last(results["doffset"]), atol=1e-4)
    np.testing.assert_allclose(dbias, results["dbias"], atol=4e-5)
    if arrays[3] is not None:
        np.testing.assert_allclose(dmask, last(results["dmask"]), atol=4e-5)


@pytest.mark.exhaustive
def test_beyond_the_edges_samples_fade():
    x = jnp.ones((1, 4, 4, 1))
    ys = []
    for up in (0.25, 0.5, 0.99, 1.0):
        offset = jnp.zeros((1, 4, 4, 2)).at[..., 0].set(-up)
        ys.append(float(jaxfused.deform_conv(x, jnp.ones((1, 1, 1, 1)), offset)[0, 0, 0, 0]))
    np.testing.assert_allclose(ys, [0.75, 0.5, 0.01, 0], atol=1e-6)


@pytest.mark.exhaustive
def test_infinity_is_outside_and_nan_reaches_the_result():
    x = jnp.ones((1, 1, 4, 1))
    offset = np.zeros((1, 1, 4, 2), np.float32)
    offset[0, 0, :3] = (np.inf, 0), (0, -np.inf), (np.nan, 0)

    def f(x, offset):
        return jaxfused.deform_conv(x, jnp.ones((1, 1, 1, 1)), offset)

    np.testing.assert_array_equal(f(x, offset).ravel(), [0, 0, np.nan, 1])
    gradient = jax.grad(lambda o: jnp.sum(f(x, o)))(jnp.asarray(offset))
    np.testing.assert_array_equal(gradient[0, 0, :2], 0)


def test_without_offsets_it_is_a_convolution():
    x = jax.random.normal(jax.random.key(0), (2, 6, 7, 4))
    w = jax.random.normal(jax.random.key(1), (3, 3, 2, 6))
    for dtype, atol in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.05)):
        options = dict(strides=2, kernel_dilation=2, feature_group_count=2)
        expected = jaxfused.conv(x.astype(dtype), w, **options)
        offset = jnp.zeros((*expected.shape[:3], 18))
        y = jaxfused.deform_conv(x.astype(dtype), w, offset, **options)
        assert y.dtype == dtype
        np.testing.assert_allclose(
            y.astype(jnp.float32), expected.astype(jnp.float32), atol=atol, rtol=atol
        )


@pytest.mark.exhaustive
def test_transforms():
    x = jax.random.normal(jax.random.key(0), (2, 4, 5, 2))
    w = jax.random.normal(jax.random.key(1), (3, 3, 2, 3))
    offset = jax.random.normal(jax.random.key(2), (2, 4, 5, 18))
    assert_transforms(lambda x, offset: jaxfused.deform_conv(x, w, offset), x, offset)
    assert jaxfused.deform_conv(x[:0], w, offset[:0]).shape == (0, 4, 5, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((4, 4, 2))), r"x has shape \(4, 4, 2\) and w \(3, 3, 2, 3\)"),
        (dict(w=jnp.ones((3, 3, 1, 3))), "x has 2 channels, w shape"),
        (dict(offset=jnp.ones((1, 4, 4, 17))), r"offset has shape \(1, 4, 4, 17\)"),
        (dict(offset=jnp.ones((1, 3, 4, 18))), r"pass offset of shape \(1, 4, 4, 18\)"),
        (dict(mask=jnp.ones((1, 4, 4, 18))), r"pass mask of shape \(1, 4, 4, 9\)"),
        (dict(bias=jnp.ones(2)), r"pass bias of shape \(3,\)"),
        (dict(padding="CIRCULAR"), "padding is 'CIRCULAR', but beyond its edges x is zero"),
        (dict(implementation="pallas"), "there is no Pallas kernel of deform_conv"),
    ],
)
def test_errors(change, message):
    good = dict(x=jnp.ones((1, 4, 4, 2)), w=jnp.ones((3, 3, 2, 3)), offset=jnp.zeros((1, 4, 4, 18)))
    with pytest.raises(ValueError, match=f"deform_conv: .*{message}"):
        jaxfused.deform_conv(**(good | change))
