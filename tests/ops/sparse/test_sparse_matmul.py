"""sparse_matmul and sampled_matmul: entries as JAX reads them, truth, gradients, kernels, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.experimental.sparse import BCOO, BCSR
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxfused
from jaxfused.ops.sparse import sparse_products_cuda
from jaxfused.ops.sparse.coordinates import Coordinates, coordinates
from jaxfused.ops.sparse.sparse_products_xla import dense_copy, repeatable_product
from tests.support import eight_devices
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate
from tests.support.transforms import assert_transforms

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
M, K, N = 40, 50, 24


def entries(dtype="float32", rows=M, columns=K, density=0.1, seed=0):
    """Returns entries in any order, of which two have one place and two lie beyond the matrix."""
    rng = np.random.default_rng(seed)
    places = rng.permutation(np.argwhere(rng.random((rows, columns)) < density))
    places[1] = places[0]
    beyond = [[rows, columns], [0, columns + 3]]
    places = np.concatenate([places, beyond])
    return put(rng.normal(size=len(places)), dtype), put(places, "int32")


def dense_of(data, places, shape=(M, K)):
    """Returns the matrix in float64."""
    dense = np.zeros(shape)
    inside = (np.asarray(places) < shape).all(1)
    np.add.at(dense, tuple(np.asarray(places)[inside].T), np.float64(data)[inside])
    return dense


def of_data(places, product=jaxfused.sparse_matmul, shape=(M, K), **options):
    return lambda data, b: product(BCOO((data, places), shape=shape), b, **options)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames="options")
def with_gradients(product, places, data, b, dy, options=()):
    y, pull_back = jax.vjp(of_data(places, product, **dict(options)), data, b)
    return y, *pull_back(dy)


def truths(data, places, b, dy):
    a, b, dy = dense_of(data, places), np.float64(b), np.float64(dy)
    inside = (np.asarray(places) < a.shape).all(1)
    rows, columns = np.where(inside[:, None], np.asarray(places), 0).T
    return a @ b, np.where(inside, np.sum(dy[rows] * b[columns], axis=1), 0), a.T @ dy


def plain(places, data, b, dy):
    """Returns what the dense product of the same dtype gives, and JAX's gradients of it."""

    def f(data, b):
        a = jnp.zeros((M, K), data.dtype).at[tuple(places.T)].add(data, mode="drop")
        return a @ b

    y, pull_back = jax.vjp(f, data, b)
    return y, *pull_back(dy)


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(1,))
def test_truth(dtype):
    data, places = entries(dtype)
    rng = np.random.default_rng(1)
    b, dy = put(rng.normal(size=(K, N)), dtype), put(rng.normal(size=(M, N)), dtype)
    ours = with_gradients(jaxfused.sparse_matmul, places, data, b, dy)
    simple = jax.jit(plain)(places, data, b, dy)
    names = ("y", "ddata", "db")
    for name, actual, one, exact in zip(
        names, ours, simple, truths(data, places, b, dy), strict=True
    ):
        assert_accurate(name, actual, one, exact)


@pytest.mark.exhaustive
def test_sums_are_in_float32():
    a = BCOO.fromdense(jnp.ones((1, 4096), jnp.bfloat16))
    assert jaxfused.sparse_matmul(a, jnp.ones((4096, 1), jnp.bfloat16)) == 4096


@parametrize("kind", ["BCSR", "BCOO", "BCOO in order", "padded"], quick=(0,))
def test_containers(kind):
    rng = np.random.default_rng(0)
    dense = np.where(rng.random((M, K)) < 0.2, rng.normal(size=(M, K)), 0).astype(np.float32)
    dense[7] = 0
    a = dict(
        BCSR=lambda: BCSR.fromdense(dense),
        BCOO=lambda: BCOO(
            (BCOO.fromdense(dense).data[::-1], BCOO.fromdense(dense).indices[::-1]),
            shape=dense.shape,
        ),
        padded=lambda: BCOO.fromdense(dense, nse=M * K),
    ).get(kind, lambda: BCOO.fromdense(dense))()
    b = put(rng.normal(size=(K, N)), "float32")
    np.testing.assert_allclose(jaxfused.sparse_matmul(a, b), dense @ b, rtol=1e-5, atol=1e-5)
    turned = jaxfused.sparse_matmul(a, b[:M, 0], transpose_a=True)
    np.testing.assert_allclose(turned, dense.T @ b[:M, 0], rtol=1e-5, atol=1e-5)
    x, y = put(rng.normal(size=(M, 8)), "float32"), put(rng.normal(size=(8, K)), "float32")
    sampled = jaxfused.sampled_matmul(x, y, a)
    assert type(sampled) is type(a)
    np.testing.assert_allclose(sampled.todense(), np.where(dense, x @ y, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_negative_indices_count_from_the_end():
    a = BCOO((jnp.array([1.0, 2.0]), jnp.array([[-1, 0], [0, -2]])), shape=(2, 3))
    y = jaxfused.sparse_matmul(a, jnp.eye(3))
    np.testing.assert_array_equal(y, [[0, 2, 0], [1, 0, 0]])


@parametrize("index", [-4, 2**31 - 1, 2**32 + 1, -(2**32)], quick=(0,))
@pytest.mark.parametrize("axis", [0, 1])
def test_entries_beyond_either_end_count_for_nothing(axis, index):
    """Neither the lower 32 bits of an index nor the end from which JAX counts makes an entry of it."""
    places = np.array([[1, 1], [1, 1]])
    places[0, axis] = index
    eye, expected = jnp.eye(3), np.diag([0.0, 1.0, 0.0])
    with jax.enable_x64(True):
        a = BCOO((jnp.ones(2, "float32"), jnp.asarray(places)), shape=(3, 3))
        for form in (a, a.T):
            y = jaxfused.sparse_matmul(form, eye)
            np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(dense_copy(a.data, coordinates(a), (3, 3)), expected)
        np.testing.assert_array_equal(jaxfused.sampled_matmul(X, X.T, a).data, [0, X[1] @ X[1]])


def by_copy(data, places, b, *, rows, out_dtype):
    return (dense_copy(data, places, (rows, b.shape[0])) @ b).astype(out_dtype)


@pytest.mark.parametrize("product", [by_copy, repeatable_product])
@pytest.mark.parametrize("in_order", [True, False])
def test_products_of_a_gpu_in_xla(product, in_order):
    """Entries of one place add up, in any order, and padding counts for nothing."""
    rng = np.random.default_rng(0)
    places = rng.integers([7, 5], size=(60, 2))
    places[::9] = (7, 5)
    if in_order:
        places = places[np.argsort(places[:, 0], kind="stable")]
    data, b = rng.standard_normal(60), rng.standard_normal((5, 3))
    expected = np.zeros((8, 6))
    np.add.at(expected, tuple(places.T), data)
    a = BCOO(
        (jnp.asarray(data, "float32"), jnp.asarray(places)), shape=(7, 5), indices_sorted=in_order
    )
    options = dict(rows=7, out_dtype="float32")
    y = product(a.data, coordinates(a), jnp.asarray(b, "float32"), **options)
    np.testing.assert_allclose(y, expected[:7, :5] @ b, rtol=1e-5, atol=1e-5)


X = jnp.arange(6.0).reshape(3, 2)


@pytest.mark.exhaustive
def test_entries_before_the_first_row_count_for_nothing():
    a = BCSR((jnp.arange(1.0, 4.0), jnp.array([0, 1, 1]), jnp.array([1, 2, 3])), shape=(2, 2))
    np.testing.assert_array_equal(jaxfused.sparse_matmul(a, jnp.eye(2)), [[0, 2], [0, 3]])
    many = BCSR((jnp.arange(1.0, 8.0), jnp.zeros(7, int), jnp.array([5, 6, 7])), shape=(2, 2))
    options = dict(rows=2, out_dtype="float32")
    y = repeatable_product(many.data, coordinates(many), jnp.eye(2), **options)
    np.testing.assert_array_equal(y, [[6, 0], [7, 0]])
    y = by_copy(many.data, coordinates(many), jnp.eye(2), **options)
    np.testing.assert_array_equal(y, [[6, 0], [7, 0]])


@pytest.mark.exhaustive
def test_what_is_not_an_entry_is_not_multiplied():
    a = BCOO.fromdense(jnp.array([[0.0, 2.0], [1.0, 0.0]]))
    y = jaxfused.sparse_matmul(a, jnp.array([[jnp.nan], [3.0]]))
    assert y[0, 0] == 6 and jnp.isnan(y[1, 0])


@pytest.mark.exhaustive
def test_without_entries():
    a = BCOO.fromdense(jnp.zeros((3, 4)))
    assert not jaxfused.sparse_matmul(a, jnp.ones((4, 2))).any()
    assert jaxfused.sampled_matmul(jnp.ones((3, 2)), jnp.ones((2, 4)), a).data.shape == (0,)


@pytest.mark.exhaustive
def test_transformations():
    data, places = entries()
    b = put(np.random.default_rng(1).normal(size=(K, N)), "float32")
    assert_transforms(of_data(places), data, b)


@pytest.mark.exhaustive
def test_derivatives_in_both_modes():
    data, places = entries()
    b = put(np.random.default_rng(1).normal(size=(K, 3)), "float32")
    check_grads(of_data(places), (data, b), 1, ("fwd", "rev"), atol=2e-2, rtol=2e-2)

    def sampled(x, y):
        return jaxfused.sampled_matmul(x, y, BCOO((data, places), shape=(M, K))).data

    check_grads(sampled, (b[:M], b.T), 1, ("fwd", "rev"), atol=2e-2, rtol=2e-2)


@pytest.mark.exhaustive
def test_gradient_by_jax_experimental_sparse():
    data, places = entries()
    a, b = BCOO((data, places), shape=(M, K)), jnp.ones((K, N))
    gradient = sparse.grad(lambda a: jnp.sum(jaxfused.sparse_matmul(a, b)))(a)
    inside = (np.asarray(places) < (M, K)).all(1)
    np.testing.assert_array_equal(gradient.data, N * inside)


def test_kernels_that_are_launched(with_library):
    data, places = entries("bfloat16")
    b, dy = jnp.ones((K, N), jnp.bfloat16), jnp.ones((M, N), jnp.bfloat16)
    run = functools.partial(with_gradients.__wrapped__, jaxfused.sparse_matmul, places)
    options = (("implementation", "cuda"),)
    by_rows = ["jaxfused_csr_starts", "jaxfused_csr_matmul"]
    launched = [*by_rows, "jaxfused_sampled_matmul", *by_rows]
    assert kernels(functools.partial(run, options=options), data, b, dy) == launched
    batched = jax.vmap(of_data(places, implementation="cuda"), (None, 0))
    assert kernels(batched, data, jnp.stack([b, b])) == by_rows
    a = BCSR.fromdense(jnp.eye(M, K, dtype=jnp.bfloat16))
    assert kernels(lambda b: jaxfused.sparse_matmul(a, b, implementation="cuda"), b) == by_rows[1:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "density, in_order, launched",
    [
        (0.001, True, ["jaxfused_csr_starts", "jaxfused_csr_matmul"]),
        (0.2, True, ["jaxfused_csr_starts", "jaxfused_csr_dense"]),
        (0.2, False, []),
    ],
)
def test_where_the_matrix_is_not_so_sparse_the_dense_product_runs(
    with_library, density, in_order, launched
):
    count = int(8192 * 8192 * density)
    data = jax.ShapeDtypeStruct((count,), jnp.bfloat16)
    places = jax.ShapeDtypeStruct((count, 2), jnp.int32)
    b = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
    flags = dict(shape=(8192, 8192), indices_sorted=in_order, unique_indices=True)
    product = lambda *a: jaxfused.sparse_matmul(BCOO(a[:2], **flags), a[2])  # noqa: E731
    assert kernels(product, data, places, b) == launched


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_columns_on_several_devices(axis_type):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    data, places = entries()
    rng = np.random.default_rng(1)
    b, dy = put(rng.normal(size=(K, N)), "float32"), put(rng.normal(size=(M, N)), "float32")
    alone = with_gradients(jaxfused.sparse_matmul, places, data, b, dy)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P(None, "d"))
        b, dy = (jax.device_put(a, split) for a in (b, dy))
        shared = with_gradients(jaxfused.sparse_matmul, places, data, b, dy)
    for ours, exact in zip(shared, alone, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="runs the cases of eight devices")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


@pytest.mark.exhaustive
def test_export():
    data, places = entries()
    b = jnp.ones((K, N))
    f = jax.jit(lambda data, places, b: of_data(places)(data, b))
    exported = jax.export.export(f)(data, places, b)
    np.testing.assert_allclose(exported.call(data, places, b), f(data, places, b), rtol=1e-6)


GPU_CASES = [(1, "float32"), (7, "float32"), (24, "bfloat16"), (24, "float32"), (136, "float16")]


@pytest.mark.gpu
@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("columns, dtype", GPU_CASES)
def test_on_a_gpu(columns, dtype):
    """Compares small integers, whose sums are exact."""
    rng = np.random.default_rng(0)
    _, places = entries()
    data = put(rng.integers(-3, 4, size=len(places)), dtype)
    b, dy = (put(rng.integers(-3, 4, size=(n, columns)), dtype) for n in (K, M))
    options = (("implementation", "cuda"),)
    ours = with_gradients(jaxfused.sparse_matmul, places, data, b, dy, options=options)
    again = with_gradients(jaxfused.sparse_matmul, places, data, b, dy, options=options)
    for actual, same, exact in zip(ours, again, truths(data, places, b, dy), strict=True):
        np.testing.assert_array_equal(np.float64(actual), exact)
        np.testing.assert_array_equal(np.float64(actual), np.float64(same))


@pytest.mark.gpu
@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("depth, dtype", [(50, "float32"), (9001, "bfloat16"), (9016, "float16")])
def test_entries_in_order_on_a_gpu(depth, dtype):
    """Padding, negative rows and columns beyond the matrix are in neither the product nor the copy."""
    rng = np.random.default_rng(0)
    at = np.sort(rng.choice(M * depth, 3 * M, replace=False))
    rows = np.concatenate([[-3, -1], at // depth, [M, M + 5]])
    columns = np.concatenate([[0, 1], at % depth, [0, 1]])
    columns[7::19], columns[8::23] = depth + 2, -1
    data = put(rng.integers(-3, 4, size=len(rows)), dtype)
    b = put(rng.integers(-3, 4, size=(depth, 40)), dtype)
    inside = (rows >= 0) & (rows < M) & (columns >= 0) & (columns < depth)
    dense = np.zeros((M, depth))
    dense[rows[inside], columns[inside]] = np.float64(data)[inside]
    places = Coordinates(put(rows, "int32"), put(columns, "int32"), True, True)
    starts = put(np.searchsorted(rows, np.arange(M + 1)), "int32")
    indices = np.stack([rows, np.where(columns == 2, 2 - depth, columns)], axis=1)
    indices[columns == -1, 1] = -1 - depth
    for given in (
        places,
        places._replace(starts=starts),
        places._replace(indices=put(indices, "int32")),
    ):
        copy = sparse_products_cuda.dense_copy(data, given, (M, depth))
        np.testing.assert_array_equal(np.float64(copy), dense)
        y = sparse_products_cuda.sparse_product(data, given, b, rows=M)
        np.testing.assert_array_equal(np.float64(y), dense @ np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("count", [1, 3, 5])
def test_rows_without_entries_are_zero_on_a_gpu(count):
    """The kernel reads groups of entries, and a row without any reads none of another row."""
    at = jnp.arange(count)
    a = BCOO((at + 1.0, jnp.stack([at, at], 1)), shape=(9, 9), indices_sorted=True)
    y = jaxfused.sparse_matmul(a, jnp.ones((9, 13)), implementation="cuda")
    np.testing.assert_array_equal(y[:, 12], [*range(1, count + 1), *[0] * (9 - count)])


A = BCOO.fromdense(jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jaxfused.sparse_matmul(jnp.ones((2, 3)), jnp.ones((3, 1))), "pass a BCOO or BCSR"),
        (
            lambda: jaxfused.sparse_matmul(sparse.CSR.fromdense(jnp.eye(3)), jnp.ones(3)),
            r"BCOO.fromdense\(a.todense\(\)\)",
        ),
        (lambda: jaxfused.sparse_matmul(A, jnp.ones((2, 1))), r"pass b of shape \(3, columns\)"),
        (lambda: jaxfused.sparse_matmul(A, jnp.ones((3, 1), int)), "floating-point b"),
        (
            lambda: jaxfused.sparse_matmul(
                BCOO.fromdense(jnp.ones((2, 3)), n_dense=1), jnp.ones(3)
            ),
            "1 dense",
        ),
        (
            lambda: jaxfused.sparse_matmul(A, jnp.ones(3), implementation="pallas"),
            "no Pallas kernel",
        ),
        (
            lambda: jaxfused.sampled_matmul(jnp.ones((3, 2)), jnp.ones((2, 3)), A),
            r"\(2, features\)",
        ),
        (lambda: jaxfused.sparse_matmul(A, A.T), "b is a BCOO.*pass b.todense"),
        (lambda: jaxfused.sampled_matmul(A, A.T, A), "x is a BCOO.*pass x.todense"),
        (
            lambda: sparse.sparsify(jaxfused.sparse_matmul)(A, jnp.ones((3, 1))),
            "outside of its `sparsify`",
        ),
        (lambda: jaxfused.sampled_matmul(jnp.ones((2, 2)), jnp.ones((3, 3)), A), r"shape \(2, 3\)"),
    ],
)
def test_messages(call, words):
    with pytest.raises(ValueError, match=words):
        call()
