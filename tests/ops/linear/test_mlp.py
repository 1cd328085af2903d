import itertools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from jaxfused.runtime import dropout
from jaxfused.runtime.activation import activate
from tests.cases.mlp import CASES, KERNEL_CASES
from tests.support.against_float64 import COTANGENTS, assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.tensor_cores import product
from tests.support.transforms import assert_transforms

PAIRS = [(case, "float32") for case in CASES] + [(CASES[0], "bfloat16"), (CASES[1], "float16")]


def affine(x, w, b):
    y = product(x, w.astype(x.dtype))
    return y if b is None else y + b.astype(x.dtype)


def plain_mlp(case):
    def f(x, w1, b1, w2, b2, residual):
        y = affine(activate(case.activation, affine(x, w1, b1)), w2, b2)
        return y if residual is None else y + residual

    return f


def plain_gated_mlp(case):
    def f(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual):
        h = activate(case.activation, affine(x, w_gate, b_gate)) * affine(x, w_up, b_up)
        y = affine(h, w_down, b_down)
        return y if residual is None else y + residual

    return f


def fused_mlp(case, save="preactivation", implementation=None):
    def f(x, w1, b1, w2, b2, residual):
        return jaxfused.mlp(
            x,
            w1,
            b1,
            w2,
            b2,
            activation=case.activation,
            residual=residual,
            save=save,
            implementation=implementation,
        )

    return f


def fused_gated_mlp(case, save="preactivation", one_matrix=False, implementation=None):
    def f(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual):
        if one_matrix:
            w_gate, w_up = jnp.concatenate([w_gate, w_up], axis=-1), None
            if b_gate is not None:
                b_gate, b_up = jnp.concatenate([b_gate, b_up]), None
        return jaxfused.gated_mlp(
            x,
            w_gate,
            w_up,
            w_down,
            b_gate=b_gate,
            b_up=b_up,
            b_down=b_down,
            activation=case.activation,
            residual=residual,
            save=save,
            implementation=implementation,
        )

    return f


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
def test_mlp_is_as_accurate_as_jax_numpy(case, dtype):
    args = case.mlp_arguments(jnp.dtype(dtype))
    assert_values_and_gradients(fused_mlp(case), plain_mlp(case), *args)


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
def test_gated_mlp_is_as_accurate_as_jax_numpy(case, dtype):
    args = case.gated_arguments(jnp.dtype(dtype))
    assert_values_and_gradients(fused_gated_mlp(case), plain_gated_mlp(case), *args)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_one_matrix_is_two(case):
    args = case.gated_arguments(jnp.float32)
    assert_values_and_gradients(
        fused_gated_mlp(case, one_matrix=True), plain_gated_mlp(case), *args
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_save_says_what_is_kept(gated, dtype):
    case = CASES[0]
    fused = fused_gated_mlp if gated else fused_mlp
    args = case.gated_arguments(dtype) if gated else case.mlp_arguments(dtype)
    results = {}
    for save in ("hidden", "preactivation", "inputs"):
        f = fused(case, save)

        def value_and_gradients(*args, f=f):
            y, vjp = jax.vjp(f, *args)
            return y, vjp(args[-1])

        kept = jax.tree.leaves(jax.vjp(f, *args)[1])
        wide = [a for a in kept if a.shape == (*case.rows, case.hidden)]
        program = jax.jit(value_and_gradients).lower(*args)
        results[save] = jax.tree.leaves(program.compile()(*args))
        assert all(a.dtype == dtype for a in kept)
        assert len(wide) == (0 if save == "inputs" else 1 + gated)
        # Each weight has one product forward and two backward; "inputs" recomputes the first layer's.
        products, weights = program.as_text().count("stablehlo.dot_general"), 2 + gated
        assert products == 3 * weights + (weights - 1) * (save == "inputs")
    for save in ("hidden", "inputs"):
        chex.assert_trees_all_equal(results[save], results["preactivation"])


@pytest.mark.parametrize("gated", [False, True])
def test_transforms(gated):
    case = CASES[0]
    if gated:
        assert_transforms(fused_gated_mlp(case), *case.gated_arguments(jnp.float32))
    else:
        assert_transforms(fused_mlp(case), *case.mlp_arguments(jnp.float32))


def test_derivatives_of_both_orders_and_modes():
    case = CASES[1]
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: np.asarray(a, np.float64), case.gated_arguments(jnp.float32))
        f = jax.jit(fused_gated_mlp(case))
        check_grads(f, args, order=1, modes=["fwd"])
        check_grads(f, args, order=2, modes=["rev"])


def dropping(gated, *, save="preactivation", rate=0.25, rows=(3, 5)):
    """Returns an operator with dropout, the same in plain jax.numpy, and operands."""
    x, *weights = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(*rows, 8), (8, 12), (8, 12), (12, 6)])
    )
    key = jax.random.key(7)
    options = dict(dropout_rate=rate, dropout_key=key, save=save)

    def ours(x, w_gate, w_up, w_down):
        if gated:
            return jaxfused.gated_mlp(x, w_gate, w_up, w_down, **options)
        return jaxfused.mlp(x, w_up, None, w_down, activation="silu", **options)

    def plain(x, w_gate, w_up, w_down):
        h = jax.nn.silu(x @ w_gate) * (x @ w_up) if gated else jax.nn.silu(x @ w_up)
        words = jax.random.bits(key, (2,), jnp.uint32)
        kept = dropout.keep_rows(words, h.shape, rate)
        return jnp.where(kept, h / (1 - rate), 0) @ w_down

    return ours, plain, (x, *weights)


@parametrize(
    ("gated", "save"),
    list(itertools.product([False, True], ["preactivation", "inputs"])),
    quick=(1, 2),
)
def test_dropout_between_the_products(gated, save):
    ours, plain, operands = dropping(gated, save=save)
    chex.assert_trees_all_close(ours(*operands), plain(*operands), rtol=1e-5, atol=1e-5)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2, 3)))(*operands)
        for f in (ours, plain)
    ]
    chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-5)
    saved = [jax.eval_shape(lambda *a, f=f: jax.vjp(f, *a)[1], *operands) for f in (ours, plain)]
    masks = [[leaf for leaf in jax.tree.leaves(tree) if leaf.dtype == bool] for tree in saved]
    assert not masks[0] and masks[1]


def test_dropout_drops_its_share_and_no_two_rows_alike():
    words = jax.random.bits(jax.random.key(0), (2,), jnp.uint32)
    keep_rows = jax.jit(dropout.keep_rows, static_argnums=(1, 2))
    kept = np.asarray(keep_rows(words, (50, 4, 1001), 0.25))
    assert abs(kept.mean() - 0.75) < 5e-3
    assert len({row.tobytes() for row in kept.reshape(-1, 1001)}) == 200
    np.testing.assert_array_equal(kept.reshape(200, 1001), keep_rows(words, (200, 1001), 0.25))


def test_a_key_that_was_used_is_what_jax_says_of_it():
    x, w = jnp.ones((4, 8)), jnp.eye(8)
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        jaxfused.mlp(x, w, None, w, dropout_rate=0.5, dropout_key=key)
        with pytest.raises(jax.errors.KeyReuseError):
            jaxfused.mlp(x, w, None, w, dropout_rate=0.5, dropout_key=key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dropout_rate=0.1), r"mlp: dropout_rate is 0\.1, but dropout_key is None"),
        (dict(dropout_rate=1.0), r"mlp: dropout_rate must be in the range \[0, 1\)"),
        (
            dict(dropout_rate=0.1, implementation="pallas"),
            "no Pallas kernel of mlp with dropout yet",
        ),
        (dict(dropout_rate=0.1, implementation="cuda"), "no CUDA kernel of mlp with dropout yet"),
    ],
)
def test_errors_of_dropout(options, message):
    if "implementation" in options:
        options = options | dict(dropout_key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        jaxfused.mlp(jnp.ones((2, 3)), jnp.ones((3, 4)), None, jnp.ones((4, 5)), **options)


def test_dtype_of_the_result():
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 3), jnp.bfloat16)
    assert jaxfused.mlp(x, w, None, w).dtype == jnp.bfloat16
    assert jaxfused.mlp(x, w, None, w, residual=jnp.ones((2, 3))).dtype == jnp.float32
    assert jaxfused.gated_mlp(x, w, w, w, out_dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1": jnp.ones((4, 5))}, r"w1 has shape \(4, 5\), but x has 3 features"),
        ({"b1": jnp.ones(4)}, r"b1 has shape \(4,\), but w1 has 5 features"),
        ({"w2": jnp.ones((4, 3))}, r"w2 has shape \(4, 3\), but the hidden layer has 5 features"),
        ({"b2": jnp.ones(4)}, r"b2 has shape \(4,\), but w2 has 3 features"),
        ({"residual": jnp.ones(3)}, r"residual has shape \(3,\).*\(2, 3\)"),
        ({"x": jnp.ones((2, 3), int)}, "x has dtype int32"),
        ({"activation": "swish"}, "activation='swish'"),
        (
            {"save": "all"},
            "save='all' is not known; pass one of 'hidden', 'preactivation', 'inputs'",
        ),
    ],
)
def test_errors_of_mlp(change, message):
    args = {"x": jnp.ones((2, 3)), "w1": jnp.ones((3, 5)), "b1": None, "w2": jnp.ones((5, 3))}
    with pytest.raises(ValueError, match=f"^mlp: .*{message}"):
        jaxfused.mlp(**(args | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_up": None}, r"w_gate has shape \(3, 5\), but without w_up"),
        ({"w_up": None, "w_gate": jnp.ones((3, 10)), "b_up": jnp.ones(5)}, "without w_up"),
        ({"w_up": jnp.ones((3, 4))}, r"w_up has shape \(3, 4\)"),
        ({"b_up": jnp.ones(4)}, "b_up has shape"),
        ({"b_gate": jnp.ones(4)}, "b_gate has shape"),
        ({"w_down": jnp.ones((4, 3))}, "the hidden layer has 5 features"),
    ],
)
def test_errors_of_gated_mlp(change, message):
    args = {"x": jnp.ones((2, 3)), "w_gate": jnp.ones((3, 5)), "w_up": jnp.ones((3, 5))}
    args |= {"w_down": jnp.ones((5, 3))}
    with pytest.raises(ValueError, match=f"^gated_mlp: .*{message}"):
        jaxfused.gated_mlp(**(args | change))


# --- kernels --------------------------------------------------------------------------------------

KERNEL_WAYS = (
    *((case, "bfloat16", "preactivation") for case in KERNEL_CASES),
    (KERNEL_CASES[0], "float16", "inputs"),
    (KERNEL_CASES[0], "float32", "preactivation"),
    (KERNEL_CASES[1], "bfloat16", "hidden"),
)
each_kernel_case = pytest.mark.parametrize(("case", "dtype", "save"), KERNEL_WAYS, ids=str)
# The first bfloat16 case takes the same path as float16 and as the single matrix below.
INTERPRETED_WAYS = KERNEL_WAYS[1:]


def check_mlp_kernel(case, dtype, save, implementation, cotangents=COTANGENTS):
    args = case.mlp_arguments(jnp.dtype(dtype))
    ours = fused_mlp(case, save, implementation)
    assert_values_and_gradients(ours, plain_mlp(case), *args, cotangents=cotangents)


def check_gated_mlp_kernel(case, dtype, save, one_matrix, implementation, cotangents=COTANGENTS):
    args = case.gated_arguments(jnp.dtype(dtype))
    ours = fused_gated_mlp(case, save, one_matrix, implementation)
    assert_values_and_gradients(ours, plain_gated_mlp(case), *args, cotangents=cotangents)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(("case", "dtype", "save"), INTERPRETED_WAYS, quick=())
def test_pallas_mlp_in_the_interpreter(case, dtype, save):
    check_mlp_kernel(case, dtype, save, "pallas", cotangents=1)


# `make test` runs one tile with every option, which takes half the time of the others.
@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(("case", "dtype", "save"), INTERPRETED_WAYS, quick=(2,))
def test_pallas_gated_mlp_in_the_interpreter(case, dtype, save):
    check_gated_mlp_kernel(case, dtype, save, False, "pallas", cotangents=1)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("save", ["preactivation", "hidden"], quick=())
def test_pallas_gated_mlp_of_one_matrix_in_the_interpreter(save):
    check_gated_mlp_kernel(KERNEL_CASES[0], "bfloat16", save, True, "pallas", cotangents=1)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("hidden", "filled", "implementation"),
    [(938, 960, None), (21, 24, "pallas"), (2736, 2736, None)],
)
def test_odd_hidden_features_are_filled_up_with_zeros(hidden, filled, implementation):
    """Filling lets Pallas's kernels run, for gradients too; `explain` shows the filled sizes."""
    rows = 2**14
    x, w, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 64), (64, hidden), (hidden,)))
    both, down = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 2 * hidden), (hidden, 64)))

    def mlp(x, w1, b1, w2):
        return jnp.sum(jaxfused.mlp(x, w1, b1, w2, implementation=implementation))

    def gated(x, both, down):
        return jnp.sum(jaxfused.gated_mlp(x, both, None, down, implementation=implementation))

    for f, operands in ((mlp, (x, w, b, down)), (gated, (x, both, down))):
        gradient = jax.grad(f, argnums=tuple(range(len(operands))))
        assert jax.tree.map(jnp.shape, jax.eval_shape(gradient, *operands)) == tuple(
            o.shape for o in operands
        )
        seen = str(jaxfused.explain(gradient, *operands))
        assert f"{rows}, {filled}]" in seen


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
def test_zero_features_change_no_result():
    case = replace(KERNEL_CASES[0], rows=(66,), hidden=21)
    check_mlp_kernel(case, "bfloat16", "preactivation", "pallas", cotangents=1)
    check_gated_mlp_kernel(case, "bfloat16", "hidden", True, "pallas", cotangents=1)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [3, 24])
def test_gradient_of_one_matrix_is_that_of_two(rows):
    """With fewer rows than features, other arrays are concatenated than with more."""
    rng = np.random.default_rng(0)
    x, w_gate, w_up, w_down = (
        put(rng.normal(size=shape), jnp.float32)
        for shape in ((2, rows // 2, 16), (16, 8), (16, 8), (8, 16))
    )

    def of_two(x, w_gate, w_up, w_down):
        return jnp.sum(jaxfused.gated_mlp(x, w_gate, w_up, w_down))

    def of_one(x, w_gate, w_up, w_down):
        both = jnp.concatenate([w_gate, w_up], axis=-1)
        return jnp.sum(jaxfused.gated_mlp(x, both, None, w_down))

    actual, expected = (
        jax.grad(f, argnums=(0, 1, 2, 3))(x, w_gate, w_up, w_down) for f in (of_one, of_two)
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@each_kernel_case
def test_pallas_mlp_on_gpu(case, dtype, save):
    check_mlp_kernel(case, dtype, save, "pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("one_matrix", [False, True])
@each_kernel_case
def test_pallas_gated_mlp_on_gpu(case, dtype, save, one_matrix):
    check_gated_mlp_kernel(case, dtype, save, one_matrix, "pallas")


each_cuda_case = pytest.mark.parametrize(
    ("case", "dtype", "save"),
    [
        (case, dtype, save)
        for case in (*CASES, *KERNEL_CASES)
        for dtype, save in (
            ("bfloat16", "preactivation"),
            ("bfloat16", "hidden"),
            ("float16", "inputs"),
            ("float32", "preactivation"),
        )
    ],
    ids=str,
)


@pytest.mark.gpu
@each_cuda_case
def test_cuda_mlp_on_gpu(case, dtype, save):
    check_mlp_kernel(case, dtype, save, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("one_matrix", [False, True])
@each_cuda_case
def test_cuda_gated_mlp_on_gpu(case, dtype, save, one_matrix):
    check_gated_mlp_kernel(case, dtype, save, one_matrix, "cuda")
