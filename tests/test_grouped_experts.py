"""The grouped product of tokens with their experts against one expert after another: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import expert_parallel, moe, sharding

TOKENS, PER_TOKEN, EXPERTS, D, F = 48, 3, 8, 8, 16


@pytest.mark.parametrize(
    ("first", "here", "parts", "crowded"),
    [
        pytest.param(0, 8, 1, False, marks=pytest.mark.slow, id="all are here"),
        pytest.param(2, 4, 1, False, marks=pytest.mark.slow, id="some choices belong to nobody"),
        pytest.param(2, 2, 4, True, marks=pytest.mark.slow, id="more than an even load: several blocks"),
    ],
)
def test_values_and_gradients_are_those_of_one_expert_after_another(first, here, parts, crowded):
    random = np.random.default_rng(first)
    shapes = (1, TOKENS, D), (1, TOKENS, PER_TOKEN), (here, D, F), (here, D, F), (here, F, D)
    h, weights, *matrices = (jnp.asarray(random.normal(scale=0.3, size=shape), jnp.float32) for shape in shapes)
    ids = random.integers(0, EXPERTS, shapes[1])
    ids = jnp.asarray(np.where(random.random(shapes[1]) < 0.9, first + 1, ids) if crowded else ids, jnp.int32)

    def total(compute, **options):
        def of(h, weights, *matrices):
            y = compute(h, weights, ids, *matrices, first, **options)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2, 3, 4), has_aux=True))(h, weights, *matrices)

    (_, expected), expected_grads = total(moe.scan)
    (_, found), grads = total(moe.megablox, parts=parts, interpret=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for grad, like in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, like, atol=1e-5 * float(jnp.abs(like).max()))


@pytest.mark.parametrize("where", ["one device", "all to all", "gathered", "tensor"])
def test_experts_with_biases_and_a_clamp_are_those_of_one_after_another(where):
    """Numbers of which a third are clamped; experts and their widths over a mesh."""
    random = np.random.default_rng(5)
    shapes = (4, TOKENS, D), (4, TOKENS, PER_TOKEN), (EXPERTS, D, F), (EXPERTS, F), (EXPERTS, D, F), (EXPERTS, F)
    inputs = [jnp.asarray(random.normal(scale=1.5, size=shape), jnp.float32) for shape in (*shapes, (EXPERTS, F, D))]
    ids = jnp.asarray(random.integers(0, EXPERTS, shapes[1]), jnp.int32)

    def total(compute, **options):
        def of(h, weights, gate, gate_bias, up, up_bias, down):
            matrices = moe.Biased(gate, gate_bias), moe.Biased(up, up_bias), down
            y = compute(h, weights, ids, *matrices, gate="clamped", **options)
            return jnp.mean(jnp.square(y)), y

        return jax.jit(jax.value_and_grad(of, argnums=tuple(range(7)), has_aux=True))(*inputs)

    (_, expected), expected_grads = total(moe.scan)
    shape = {"tensor": 4} if where == "tensor" else {"tensor": 1, "expert": 4}
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 1, **shape)
    dispatch = "all_to_all" if where == "all to all" else "gather"
    one = where == "one device"
    compute = moe.megablox if one else expert_parallel.compute("megablox", mesh, dispatch)
    (_, found), grads = total(compute, **({"interpret": True} if one else {}))
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    for grad, like in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, like, atol=2e-5 * float(jnp.abs(like).max()))


@pytest.mark.parametrize("crowded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_over_a_mesh_get_their_tokens_by_all_to_all(crowded):
    """Four devices of two experts each; crowded: most tokens choose one device's, which takes them block after block.
    Choices of no expert (zero experts) come back as nothing."""
    random = np.random.default_rng(7)
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 1, 1, expert=4)
    shapes = (4, TOKENS, D), (4, TOKENS, PER_TOKEN), (EXPERTS, D, F), (EXPERTS, D, F), (EXPERTS, F, D)
    inputs = [jnp.asarray(random.normal(scale=0.3, size=shape), jnp.float32) for shape in shapes]
    ids = random.integers(0, EXPERTS + 2, shapes[1])
    ids = jnp.asarray(np.where(random.random(shapes[1]) < 0.9, 5, ids) if crowded else ids, jnp.int32)

    def total(compute):
        def of(h, weights, *matrices):
            y = compute(h, weights, ids, *matrices)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2, 3, 4), has_aux=True))(*inputs)

    (_, expected), expected_grads = total(moe.scan)
    (_, found), grads = total(expert_parallel.compute("megablox", mesh, "all_to_all"))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for grad, like in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, like, atol=1e-5 * float(jnp.abs(like).max()))
