"""The product of activations and weights, and its gradient where either of them is the wider."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose

from posttrain.config import MeshSection
from posttrain.kernels.matmul import matmul
from posttrain.mesh import make_mesh
from tests.often import often

SIZES = [(16, 24), (24, 16), (16, 16)]


def operands(lead: tuple[int, ...], size: tuple[int, int], dtype: str) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((*lead, size[0]), size, (*lead, size[1]))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lead", often([((),), ((6,),), ((4, 6),), ((4, 2, 3),)], ((),), ((4, 6),)))
@pytest.mark.parametrize(("dtype", "added_in"), [("float32", None), ("bfloat16", None), ("bfloat16", jnp.float32)])
def test_gradient_is_the_librarys(
    lead: tuple[int, ...], size: tuple[int, int], dtype: str, added_in: type | None
) -> None:
    x, w, cotangent = operands(lead, size, dtype)
    cotangent = cotangent.astype(added_in or dtype)
    out, pull = jax.vjp(lambda x, w: matmul(x, w, added_in), x, w)
    wide, of_library = jax.vjp(jnp.matmul, *(y.astype(jnp.float32) for y in (x, w)))
    assert out.dtype == cotangent.dtype
    tolerance = 2e-5 if dtype == "float32" else 0.1
    assert_allclose(out.astype(jnp.float32), wide, atol=tolerance)
    for got, expected in zip(pull(cotangent), of_library(cotangent.astype(jnp.float32)), strict=True):
        assert got.dtype == x.dtype
        assert_allclose(got.astype(jnp.float32), expected, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_on_a_mesh(size: tuple[int, int]) -> None:
    x, w, cotangent = operands((8, 4), size, "float32")
    mesh = make_mesh(MeshSection(fsdp=4, tensor=2))
    placed = [
        jax.device_put(y, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
        for y, axes in ((x, ("fsdp",)), (w, ("fsdp", "tensor")), (cotangent, ("fsdp", None, "tensor")))
    ]

    def gradient(x: Array, w: Array, cotangent: Array) -> tuple[Array, Array]:
        return jax.vjp(matmul, x, w)[1](cotangent)

    for got, expected in zip(jax.jit(gradient)(*placed), gradient(x, w, cotangent), strict=True):
        assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_only_a_cpu_has_operands_turned(size: tuple[int, int], platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a barrier would only keep the compiler from its own choice of layouts."""
    monkeypatch.setattr("posttrain.kernels.matmul.platform_of", lambda mesh: platform)
    x, w, cotangent = operands((4, 6), size, "float32")
    text = jax.jit(lambda x, w, cotangent: jax.vjp(matmul, x, w)[1](cotangent)).lower(x, w, cotangent).as_text()
    assert ("optimization_barrier" in text) == (platform == "cpu" and size[0] > size[1])
    for got, expected in zip(jax.vjp(matmul, x, w)[1](cotangent), jax.vjp(jnp.matmul, x, w)[1](cotangent), strict=True):
        assert_allclose(got, expected, atol=2e-5)
