"""Stage 5, train: what turns a packed batch into log-probs: the decoder, its attention, its experts, on the trainer's
mesh.

Consumes weights and the arrays of a TrainBatch; produces hidden states, log-probs, entropies and what the routers did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dora_jax.models import decoder, expert_parallel, moe, sharding
from dora_jax.models.logits import target_logprobs
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.ops.segment_attention import packed_attention

Arrays = Mapping[str, Any]  # TrainBatch.arrays()
UNROLLED_LAYERS = 8  # up to here a Python loop: its backward saves a third over lax.scan on CPU and compiles as fast


class Adapted(NamedTuple):
    """The weights of a model whose adapter is trained. Both parts are stacked, or both unrolled."""

    base: Any  # in the compute type
    adapter: Any  # f32

    @staticmethod
    def parts(params: Any) -> tuple[Any, Any]:
        """(weights, adapter or None) of weights of either kind."""
        return params if isinstance(params, Adapted) else (params, None)

    @staticmethod
    def learning(params: Any) -> tuple[Any, Callable[[Any], Any]]:
        """(what is trained of the weights, the function that puts it back among the others)."""
        if isinstance(params, Adapted):
            return params.adapter, lambda adapter: params._replace(adapter=adapter)
        return params, lambda params: params


class Model(NamedTuple):
    """What turns tokens into log-probs; static."""

    cfg: decoder.ModelConfig
    mesh: Mesh
    dtype: Any
    remat: str
    temperature: float
    vocab_limit: int | None
    attention: str = "reference"  # reference, splash, cudnn
    logits_bytes: int | None = None  # of f32 logits alive at once on a device; None: all
    expert_matmul: str = "scan"  # scan, ragged_dot, megablox
    expert_dispatch: str = "gather"  # gather, all_to_all
    lora: Lora = OFF  # of weights that are Adapted
    narrow: bool = False  # projections and head multiply bfloat16, sums are float32

    def hidden(self, params: Any, arrays: Arrays) -> tuple[jax.Array, decoder.Routed | None]:
        """([B, L, D] after the last norm, each segment on its own; what the routers did, None without experts).

        Where the arrays have `routes`, tokens go to those experts; weights and gradients are the gate's own.
        """
        attend = packed_attention(
            self.attention, arrays["segment_ids"], arrays["positions"], self.mesh, arrays.get("prefix_ids")
        )
        weights, adapter = Adapted.parts(layers_of(self.cfg, params))
        routes = arrays.get("routes")
        if routes is not None:  # a row that is missing, which only padding has, is chosen by the router
            missing = (routes == jnp.iinfo(routes.dtype).max).all(-1, keepdims=True)
            routes = jnp.where(missing, moe.MISSING, routes.astype(jnp.int32))
        return decoder.forward_routed(
            self.cfg,
            weights,
            arrays["tokens"],
            arrays["positions"],
            attend,
            dtype=self.dtype,
            remat=self.remat,
            constrain=sharding.constrain_rows(self.mesh),
            merge=self.mesh.shape["context"] == 1,
            narrow=self.narrow,
            compute=expert_parallel.compute(self.expert_matmul, self.mesh, self.expert_dispatch),
            routes_BxLxMxk=routes,
            counted_BxL=arrays["segment_ids"] > 0,
            adapters=adapter,
            adapter_gain=self.lora.gain if self.lora.on else 1.0,
        )

    def rounded(self, params: Any) -> Any:
        """The weights of a mixture with their matrices in the type that they are multiplied in: gradients of a
        micro-batch, most of what its update holds, have that type until they are added up in float32. What computes in
        float32 stays so: routers, gains, and the ends, each of which has several uses. Of one device as they are."""
        if self.cfg.experts is None or self.lora.on or isinstance(params[decoder.LAYERS], list):
            return params
        axes = decoder.logical_axes(self.cfg)
        return params | {
            stack: {
                name: x.astype(self.dtype) if len(axes[stack][name]) > 2 and "router" not in axes[stack][name] else x
                for name, x in params[stack].items()
            }
            for stack in decoder.stacks(self.cfg)
        }

    def logprobs(self, params: Any, arrays: Arrays, entropy_grad: bool = False) -> tuple[jax.Array, jax.Array]:
        """(log-prob of each target, entropy) f32[B, L], after temperature, padding ids masked as in the engine."""
        return self.logprobs_routed(params, arrays, entropy_grad)[0]

    def logprobs_routed(
        self, params: Any, arrays: Arrays, entropy_grad: bool = False
    ) -> tuple[tuple[jax.Array, jax.Array], decoder.Routed | None]:
        """Like `logprobs`, and what the routers did."""
        hidden, routed = self.hidden(params, arrays)
        found = target_logprobs(
            self.cfg,
            Adapted.parts(params)[0],
            hidden,
            arrays["targets"],
            vocab_limit=self.vocab_limit,
            temperature=arrays.get("temperatures", self.temperature),
            entropy_grad=entropy_grad,
            max_bytes=self.logits_bytes,
            mesh=self.mesh,
            narrow=self.narrow,
        )
        return found, routed


def layers_of(cfg: decoder.ModelConfig, params: Any, most: int | None = None) -> Any:
    """The same weights as the forward pass runs them: unrolled where there are few layers, else scanned."""
    few = cfg.n_layers <= (UNROLLED_LAYERS if most is None else most)
    if isinstance(params, Adapted):  # a published adapter may be unrolled already
        few |= decoder.layout_of(params.adapter) == "serving"
        return Adapted(*(decoder.serving_layout(part) if few else part for part in params))
    return decoder.serving_layout(params) if few else params


def unrouted(arrays: Arrays) -> dict[str, Any]:
    """The arrays without routes, for models other than the one that was sampled from: they choose their experts."""
    return {name: x for name, x in arrays.items() if name != "routes"}
