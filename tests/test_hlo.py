"""Sums over HLO text: loops multiplied out, groups in every notation, what a device sends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from hsql_jax.hlo import Moved, shape_bytes, traffic
from hsql_jax.sharding import MeshConfig, make_mesh

TPU = """
HloModule jit_step

%all-reduce-scatter.1 (input: f32[64]) -> f32[32] {
  %input = f32[64]{0:T(128)} parameter(0)
  %all-reduce.1 = f32[64]{0:T(128)} all-reduce(%input), replica_groups={{0,2},{1,3}}, to_apply=%add
  %at = u32[] constant(0)
  ROOT %dynamic-slice.1 = f32[32]{0:T(128)} dynamic-slice(%all-reduce.1, %at), sizes={32}
}

%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[64]{0:T(128)} get-tuple-element(%state), index=1
  %fusion.1 = f32[32]{0:T(128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %near = bf16[32]{0:T(128)(2,1)S(1)} convert(%fusion.1)
  %all-gather.1 = f32[64]{0:T(128)} all-gather(%near), replica_groups=[2,2]<=[4], dimensions={0}
  ROOT %tuple = (s32[]{:T(128)}, f32[64]{0:T(128)}) tuple(%i, %all-gather.1)
}

%condition (state: (s32[], f32[64])) -> pred[] {
  %bound = s32[]{:T(128)} constant(36)
  %state.1 = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (x: (s32[], f32[64])) -> (s32[], f32[64]) {
  %start = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  ROOT %while.1 = (s32[], f32[64]{0:T(128)}) while(%start), condition=%condition, body=%body
}
"""


def test_the_text_of_the_tpu_compiler() -> None:
    """36 turns: 64 floats reduced and scattered in pairs, 32 halves gathered in pairs."""
    found = traffic(TPU, devices=4)
    assert found.collectives == {
        "reduce-scatter": Moved(36, 36 * 64 * 4 / 2),
        "all-gather": Moved(36, 36 * 32 * 2),
    }
    fusion, convert, gather = 4 * (64 + 32), 4 * 32, 4 * 64
    assert found.memory_bytes == 36 * (fusion + convert + gather)


def test_a_loop_of_unknown_length_runs_as_often_as_the_caller_says() -> None:
    text = TPU.replace("%bound = s32[]{:T(128)} constant(36)", "%bound = s32[] copy(%state.1)")
    assert traffic(text, devices=4, unknown_trips=[5]).collectives["all-gather"].times == 5


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2,3}}", 4),
        ("replica_groups=[1,4]<=[2,2]T(1,0)", 4),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=1] {'a','b'}", 4),
        ("replica_groups=mesh['a'=4,'b'=1] {'a':(1)2}", 2),
        ("replica_groups={}", 4),
    ],
)
def test_groups_in_every_notation(groups: str, size: int) -> None:
    text = TPU.replace("replica_groups=[2,2]<=[4]", groups)
    assert traffic(text, devices=4).collectives["all-gather"].bytes_sent == 36 * 64 * (size - 1)


def test_bytes_of_shapes() -> None:
    assert shape_bytes("(f32[2,3]{1,0}, pred[5], s4[8], bf16[], token[])") == 24 + 5 + 4 + 2
    near = "bf16[128,8]{1,0:T(8,128)(2,1)S(1)}"
    assert (shape_bytes(near), shape_bytes(near, anywhere=True)) == (0, 2048)


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        ("(bf16[64]{0:S(1)}, bf16[64]{0}, u32[]{:S(2)}) copy-start(%x)", 128),
        ("(bf16[64]{0}, bf16[64]{0}, u32[]{:S(2)}) copy-start(%x)", 256),
        ("((s8[64]{0}), s8[16]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:16]}", 16),
        ("bf16[16]{0} dynamic-slice(%x, %x), dynamic_slice_sizes={16}", 64),
        ("bf16[64]{0} negate(%x)", 256),
        ("bf16[64]{0} bitcast(%x)", 0),
    ],
)
def test_memory_traffic_of_one_operation(operation: str, size: int) -> None:
    """What stays near the compute units, S(1), costs nothing; a slice costs what it takes."""
    text = "ENTRY %main (x: bf16[64]) -> bf16[64] {\n  %x = bf16[64]{0} parameter(0)\n"
    assert traffic(f"{text}  ROOT %y = {operation}\n}}\n", devices=1).memory_bytes == size


def test_collectives_of_a_compiled_loop() -> None:
    """A scan of seven steps, each with an all-reduce of 24 floats over four devices."""
    mesh = make_mesh(MeshConfig(tensor=4))
    split = NamedSharding(mesh, jax.P(None, "tensor"))

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        whole = jnp.tanh(jnp.sum(x, axis=1, keepdims=True))
        return jax.lax.with_sharding_constraint(x * whole, split), None

    function = jax.jit(lambda x: jax.lax.scan(step, x, length=7)[0], in_shardings=split)
    text = function.lower(jnp.ones((24, 16))).compile().as_text()
    found = traffic(text, devices=4)
    assert found.collectives == {"all-reduce": Moved(7, 7 * 2 * 3 / 4 * 24 * 4)}
    least = 7 * 2 * 24 * 4 * 4  # the state, read and written in each step
    assert least < found.memory_bytes < 8 * least
