"""context_parallel_attention: the numbers of one device, by each method, layout and kind of axis."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from benchmarks.whole.parallel_hlo import received_bytes
from jaxfused import dispatch
from tests.support import eight_devices
from tests.support.lowering import kernels

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
B, T, N, K, H = 2, 32, 8, 4, 8
METHODS = ("all_gather", "ring", "all_to_all")


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
@pytest.mark.exhaustive
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


def arrays(dtype="float32", tokens=T):
    """Returns query, key, value, the output's cotangent, segment ids and sinks."""
    rng = np.random.default_rng(0)
    shapes = [(B, tokens, heads, H) for heads in (N, K, K, N)]
    qkv = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (B, tokens)), axis=1))
    return (*qkv, segments, jnp.asarray(rng.standard_normal(N), qkv[0].dtype))


def alone(options, q, k, v, dy, segments, sinks):
    """Returns the output and the gradients of one device."""
    given = dict(query_segment_ids=segments, key_value_segment_ids=segments)

    def f(q, k, v, sinks):
        return jaxfused.dot_product_attention(q, k, v, sinks=sinks, **given, **options)

    y, pullback = jax.vjp(f, q, k, v, sinks)
    return (y, *pullback(dy))


def shared(options, how, q, k, v, dy, segments, sinks):
    """Returns the output and the gradients of several devices."""

    def f(q, k, v, sinks):
        return jaxfused.context_parallel_attention(
            q, k, v, axis_name="context", segment_ids=segments, sinks=sinks, **how, **options
        )

    y, pullback = jax.vjp(f, q, k, v, sinks)
    return (y, *pullback(dy))


OPTIONS = [
    dict(is_causal=True),
    dict(is_causal=True, local_window_size=(5, 0), logits_soft_cap=3.0, scale=0.2),
    dict(local_window_size=(4, 9)),
    {},
]


def compare(
    options, method, layout, axis_type, spec, shape, names, with_more, given=None, close=2e-5
):
    """Compares output and gradients with those of one device, and returns both outputs."""
    q, k, v, dy, segments, sinks = given or arrays()
    if not with_more:
        segments = sinks = None
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    size, tokens = mesh.shape["context"], q.shape[1]
    order = jaxfused.zigzag_order(tokens, size) if layout == "zigzag" else np.arange(tokens)
    expected = alone(options, q, k, v, dy, segments, sinks)
    how = dict(method=method, layout=layout, spec=spec)
    with jax.set_mesh(mesh):

        def put(array, spec=spec):
            if array is None:
                return None
            spec = P(*spec[: array.ndim])
            return jax.device_put(array[:, order], NamedSharding(mesh, spec))

        operands = (*map(put, (q, k, v, dy, segments)), sinks)
        run = jax.jit(functools.partial(shared, options, how))
        got = run(*operands)
        chex.assert_trees_all_equal(got, run(*operands))
    for ours, one in zip(got, expected, strict=True):
        if ours is None:
            assert one is None
            continue
        ours = np.asarray(ours)
        back = ours[:, np.argsort(order)] if ours.ndim == 4 else ours
        np.testing.assert_allclose(back, one, rtol=close, atol=close)
    return np.asarray(got[0])[:, np.argsort(order)], np.asarray(expected[0])


@on_eight_devices
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", range(len(OPTIONS) + 1))
def test_numbers_are_those_of_one_device(options, method, layout):
    """Segment ids and sinks with some options; one case more has Explicit axes."""
    axis_type = AxisType.Explicit if options == len(OPTIONS) else AxisType.Auto
    options, with_more = OPTIONS[options % len(OPTIONS)], options % 2 == 1
    spec = P(None, "context")
    compare(options, method, layout, axis_type, spec, (4,), ("context",), with_more)


@on_eight_devices
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [20, 32])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_dropout_drops_what_one_device_drops(axis_type, layout, tokens, method):
    """Parts of 5 tokens begin at odd keys; devices split batch and heads too."""
    names = ("data", "context", "heads")
    how = dict(axis_type=axis_type, spec=P(*names), shape=(2, 2, 2), names=names)
    with jax.enable_x64(True):
        options = dict(is_causal=True, local_window_size=(13, 0), dropout_rate=0.3)
        options["dropout_key"] = jax.random.key(1)
        q, k, _, _, *more = arrays("float64", tokens)
        # With unit vectors as values the output is the probabilities.
        v = jnp.broadcast_to(jnp.eye(tokens)[None, :, None], (B, tokens, K, tokens))
        dy = jax.random.normal(jax.random.key(2), (B, tokens, N, tokens))
        given = (q, k, v, dy, *more)
        ours, one = compare(
            options, method, layout, **how, with_more=True, given=given, close=1e-12
        )
    np.testing.assert_array_equal(ours == 0, one == 0)


@on_eight_devices
@pytest.mark.parametrize(
    ("method", "tokens", "has_kernels"),
    [
        ("all_to_all", 24, True),
        ("all_gather", 32, True),
        ("all_gather", 24, False),
        ("ring", 32, False),
    ],
)
def test_kernels_with_dropout(with_library, method, tokens, has_kernels):
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    options = dict(dropout_rate=0.3, dropout_key=jax.random.key(1))
    with dispatch.assume(with_library), jax.set_mesh(mesh):
        spec = NamedSharding(mesh, P(None, "context"))
        operands = [jax.device_put(a, spec) for a in arrays("bfloat16", tokens)[:4]]

        def launched(implementation):
            how = dict(method=method, implementation=implementation)
            return kernels(functools.partial(shared, options, how), *operands, None, None)

        assert bool(launched(None)) == has_kernels
        if not has_kernels:
            with pytest.raises(ValueError, match=r"draw dropout's bits by an index"):
                launched("pallas")


def test_dropout_in_a_shard_map():
    q, k, v, *_ = arrays()
    mesh = jax.make_mesh((jax.device_count(),), ("context",), axis_types=(AxisType.Auto,))
    spec, options = P(None, "context"), dict(dropout_rate=0.3, dropout_key=jax.random.key(1))

    def f(q, k, v):
        return jaxfused.context_parallel_attention(q, k, v, axis_name="context", **options)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    expected = jaxfused.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v), expected, atol=1e-5)


@on_eight_devices
@pytest.mark.parametrize(("window", "hops"), [(0, 0), (4, 1), (5, 2), (30, 7), (None, 7)])
def test_a_ring_ends_where_the_window_does(window, hops):
    options = dict(is_causal=True)
    if window is not None:
        options["local_window_size"] = (window, 0)
    sizes = dict(axis_type=AxisType.Auto, spec=P(None, "context"), shape=(8,), names=("context",))
    compare(options, "ring", "contiguous", **sizes, with_more=True)
    q, k, v, *_ = arrays()
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        put = (jax.device_put(a, NamedSharding(mesh, P(None, "context"))) for a in (q, k, v))
        f = functools.partial(
            jaxfused.context_parallel_attention, axis_name="context", method="ring", **options
        )
        received = received_bytes(jax.jit(f).lower(*put).compile().as_text(), 8)
    own = (k.nbytes + v.nbytes) / 8
    assert received.get("collective-permute", 0) == hops * own


@on_eight_devices
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_may_be_split_too(method, axis_type):
    spec, names = P("data", "context", "heads"), ("data", "context", "heads")
    compare(OPTIONS[0], method, "zigzag", axis_type, spec, (2, 2, 2), names, True)


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_several_axes_count_as_one(method, axis_type):
    q, k, v, *_ = arrays()
    axes = ("hosts", "gpus")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(axis_type,) * 2)
    f = functools.partial(
        jaxfused.context_parallel_attention, axis_name=axes, method=method, is_causal=True
    )
    with jax.set_mesh(mesh):
        y = jax.jit(f)(*(jax.device_put(a, NamedSharding(mesh, P(None, axes))) for a in (q, k, v)))
    expected = jaxfused.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@on_eight_devices
@pytest.mark.parametrize("method", [None, "ring"])
def test_under_pmap_and_in_a_shard_map(method):
    q, k, v, *_ = arrays()
    f = functools.partial(
        jaxfused.context_parallel_attention, axis_name="context", method=method, is_causal=True
    )
    expected = jaxfused.dot_product_attention(q, k, v, is_causal=True)
    apart = [a.reshape(B, 8, T // 8, *a.shape[2:]).swapaxes(0, 1) for a in (q, k, v)]
    y = jax.pmap(f, axis_name="context")(*apart)
    np.testing.assert_allclose(y.swapaxes(0, 1).reshape(expected.shape), expected, atol=1e-5)
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    spec = P(None, "context")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v), expected, atol=1e-5)


@on_eight_devices
@pytest.mark.parametrize("method", METHODS)
def test_devices_run_kernels_and_no_program_uses_multicast(with_library, method):
    """Each device's attention lowers to kernels, with XLA's collectives between them."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    q, k, v, dy, *_ = (a.astype("bfloat16") for a in arrays()[:4])
    with dispatch.assume(with_library), jax.set_mesh(mesh):
        operands = [
            jax.device_put(a, NamedSharding(mesh, P(None, "context"))) for a in (q, k, v, dy)
        ]
        how = dict(method=method, implementation="pallas")
        f = functools.partial(shared, dict(is_causal=True), how)
        text = kernels(f, *operands, None, None)
    assert text and not [line for line in text if "multicast" in str(line)]


def test_one_device():
    q, k, v, *_, ids, _ = arrays()
    # Ids that differ in the upper bits of 64, and a window as a list.
    ids = 2 ** (33 + np.asarray(ids, np.int64))
    options = dict(is_causal=True, local_window_size=[9, 0])
    segments = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    expected = jaxfused.dot_product_attention(q, k, v, **segments, **options)
    with jax.set_mesh(jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))):
        for method in METHODS:
            y = jaxfused.context_parallel_attention(
                q, k, v, axis_name="context", method=method, segment_ids=ids, **options
            )
            np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(axis_name="rows"), r"axis_name is 'rows', but the mesh here has the axes"),
        (dict(spec=P("context")), r"split its second axis by 'context'"),
        (dict(key=jnp.ones((B, 3, K, H))), r"query has 32 tokens and key 3"),
        (dict(dropout_rate=0.5), r"dropout_rate is 0.5, but dropout_key is None"),
        (dict(layout="ring"), r"layout='ring' is not known; pass one of"),
        (dict(segment_ids=jnp.ones((B, 3), int)), r"segment_ids has shape \(2, 3\)"),
        (dict(value=jnp.ones((T, K, H))), r"value has shape .*pass one of 4 axes"),
        (dict(sinks=jnp.ones(N - 1)), rf"sinks has shape \({N - 1},\), but query has {N} heads"),
        (
            dict(local_window_size=[1, 2, 3]),
            r"parallel_attention: local_window_size is \[1, 2, 3\]",
        ),
    ],
)
def test_messages(change, message):
    q, k, v, *_ = arrays()
    given = dict(query=q, key=k, value=v, axis_name="context") | change
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jaxfused.context_parallel_attention(**given)


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_forward_mode_is_refused_with_the_remedy(method):
    q, k, v, *_ = arrays()
    f = functools.partial(
        jaxfused.context_parallel_attention,
        axis_name="context",
        method=method,
        implementation="xla",
    )
    with (
        jax.set_mesh(jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))),
        pytest.raises(TypeError, match=r"has no forward mode.*; pass method='all_to_all'"),
    ):
        jax.jvp(f, (q, k, v), (q, k, v))


@on_eight_devices
def test_explicit_operands_that_are_not_split_are_split():
    q, k, v, _, segments, _ = arrays()
    f = functools.partial(jaxfused.context_parallel_attention, axis_name="context", is_causal=True)
    expected = jaxfused.dot_product_attention(
        q, k, v, is_causal=True, query_segment_ids=segments, key_value_segment_ids=segments
    )
    with jax.set_mesh(jax.make_mesh((8,), ("context",), axis_types=(AxisType.Explicit,))):
        y = f(q, k, v, segment_ids=np.asarray(segments))
        with pytest.raises(ValueError, match="30 tokens, and 'context' has 8 devices; pad"):
            f(q[:, :30], k[:, :30], v[:, :30])
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_zigzag_order():
    np.testing.assert_array_equal(jaxfused.zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="zigzag_order: length is 6 and devices is 2"):
        jaxfused.zigzag_order(6, 2)
