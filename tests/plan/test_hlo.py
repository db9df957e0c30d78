"""Reading of optimised HLO: sizes, groups, loops, and what the compiler splits into several instructions."""

from __future__ import annotations

import pytest

from posttrain.plan.hlo import Buffer, buffers, kernel_names, read_program

TEXT = """HloModule jit_bound, is_scheduled=true

%fused_start (param_0.1: bf16[128,64]) -> bf16[512,64] {
  %param_0.1 = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[512,64]{1,0:T(8,128)(2,1)} all-gather(%param_0.1), channel_id=16, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/while/body/dot"}
  ROOT %custom-call.1 = bf16[512,64]{1,0} custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%fused_piece (param_0.2: bf16[128,64]) -> bf16[512,64] {
  %param_0.2 = bf16[128,64]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[512,64]{1,0} all-gather(%param_0.2), channel_id=16, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

%layers_condition (arg.1: (s32[], f32[32])) -> pred[] {
  %constant.28 = u32[]{:T(128)} constant(56)
  %arg.1 = (s32[]{:T(128)}, f32[32]{0}) parameter(0)
  %index.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%index.1, %constant.28), direction=LT
}

%layers (arg.2: (s32[], f32[32])) -> (s32[], f32[32]) {
  %arg.2 = (s32[]{:T(128)}, f32[32]{0}) parameter(0)
  %x.2 = f32[32]{0:T(128)S(1)} get-tuple-element(%arg.2), index=1
  %all-reduce.2 = f32[32]{0:T(128)S(1)} all-reduce(%x.2), channel_id=4, replica_groups=[2,4]<=[8], to_apply=%add
  %index.2 = u32[]{:T(128)} get-tuple-element(%arg.2), index=0
  %constant.1 = u32[]{:T(128)} constant(1)
  %add.1 = u32[]{:T(128)} add(%index.2, %constant.1)
  %add.2 = u32[]{:T(128)} add(%add.1, %constant.1)
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[32]{0}) tuple(%add.2, %all-reduce.2)
}

%tokens_condition (arg.3: (s32[], f32[32])) -> pred[] {
  %constant.32 = s32[]{:T(128)} constant(32)
  %arg.3 = (s32[]{:T(128)}, f32[32]{0}) parameter(0)
  %index.3 = s32[]{:T(128)} get-tuple-element(%arg.3), index=0
  %lt.3 = pred[]{:T(512)} compare(%index.3, %constant.32), direction=LT
  %all-reduce.3 = s32[]{:T(128)} all-reduce(%index.3), channel_id=17, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%add
  ROOT %and.3 = pred[]{:T(512)} and(%lt.3, %lt.3)
}

%tokens (arg.4: (s32[], f32[32])) -> (s32[], f32[32]) {
  %arg.4 = (s32[]{:T(128)}, f32[32]{0}) parameter(0)
  %fusion.1 = bf16[512,64]{1,0} fusion(%arg.4), kind=kCustom, calls=%fused_start
  %fusion.2 = bf16[512,64]{1,0} fusion(%fusion.1), kind=kCustom, calls=%fused_piece
  ROOT %while.4 = (s32[]{:T(128)}, f32[32]{0}) while(%arg.4), condition=%layers_condition, body=%layers
}

%scattered (param_0.5: f32[64,8]) -> f32[64,8] {
  %param_0.5 = f32[64,8]{1,0} parameter(0)
  ROOT %all-reduce.5 = f32[64,8]{1,0} all-reduce(%param_0.5), channel_id=9, replica_groups={}, to_apply=%add
}

ENTRY %main.1 (p.1: f32[64,8], p.2: (s32[], f32[32])) -> (s32[], f32[32]) {
  %p.1 = f32[64,8]{1,0} parameter(0)
  %p.2 = (s32[]{:T(128)}, f32[32]{0}) parameter(1)
  %all-reduce-scatter.1 = f32[8,8]{1,0} fusion(%p.1), kind=kCustom, calls=%scattered
  %permute-start.1 = (f32[64,8]{1,0}, f32[64,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p.1), channel_id=7, source_target_pairs={{0,1},{1,0}}
  %gather-start.1 = (f32[64,8]{1,0}, f32[512,8]{1,0}) all-gather-start(%p.1), channel_id=8, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %alone.1 = f32[64,8]{1,0} all-reduce(%p.1), channel_id=12, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %kernel.1 = f32[64,8]{1,0} custom-call(%p.1), custom_call_target="tpu_custom_call", backend_config={"name":"splash",
"xprof_metadata":"{\\"block_q\\": 512}
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %while.1 = (s32[]{:T(128)}, f32[32]{0}) while(%p.2), condition=%tokens_condition, body=%tokens
}
"""  # noqa: E501


def test_collectives_with_their_loops_and_bytes() -> None:
    found = {(c.kind, c.loops): c for c in read_program(TEXT, 8).collectives}
    gather = found["all-gather", (None,)]
    assert gather.group == 4 and gather.operands == (Buffer("bf16", (128, 64)),)
    assert gather.wire == 512 * 64 * 2 * 3 / 4
    reduce = found["all-reduce", (None, 28)]
    assert reduce.wire == 2 * 32 * 4 * 3 / 4 and reduce.executions() == 28 and reduce.executions([10]) == 280
    assert found["reduce-scatter", ()].wire == 8 * 8 * 4 * 7
    assert found["collective-permute", ()].wire == 64 * 8 * 4
    assert found["all-gather", ()].wire == 512 * 8 * 4 * 7 / 8
    assert found["all-reduce", (None,)].group == 2, "that of the condition"
    assert len(found) == 6, "one of its pieces counts, and no group of one device"


def test_totals_kernels_and_buffers() -> None:
    program = read_program(TEXT, 8)
    by_kind = program.wire_by_kind([10])
    assert sum(by_kind.values()) == program.wire([10])
    assert by_kind["all-reduce"] == 10 * (28 * 2 * 32 * 4 * 3 / 4 + 4)
    assert program.kernels["tpu_custom_call"] == 1
    assert str(program.largest(1)[0].buffer) == "bf16[512,64]"


def test_cycles_are_added_by_loop() -> None:
    """Not the number near 2^63 that stands for none."""
    text = TEXT
    for place, cycles in {
        "calls=%fused_start": 900,
        "calls=%fused_piece": 2**63 - 1,
        "replica_groups=[2,4]": 40,
    }.items():
        text = text.replace(place, f'backend_config={{"estimated_cycles":"{cycles}"}}, {place}')
    assert +read_program(text, 8).cycles == {(None,): 900, (None, 28): 40}


def test_collectives_of_shard_map_share_a_channel() -> None:
    """And a reduce-scatter is known by its fusion or by what that calls."""
    line = next(line for line in TEXT.splitlines() if "%gather-start.1 =" in line)
    twice = TEXT.replace(line, f"{line}\n{line.replace('gather-start.1', 'gather-start.2')}")
    twice = twice.replace("%all-reduce-scatter.1", "%fusion.9").replace("%scattered", "%all-reduce-scatter")
    before, after = ([c.kind for c in read_program(text, 8).collectives] for text in (TEXT, twice))
    assert sorted(after) == sorted([*before, "all-gather"])


SEND = '  %send.{0} = (f32[64,8]{{1,0}}, u32[], token[]) send(%p.1, %token.1), channel_id={0}, is_host_transfer=true, frontend_attributes={{_xla_megascale_target="{{1,2}}x{{0:3}}",_xla_megascale_transfer_type="{1}"}}\n'  # noqa: E501


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("ALL_REDUCE", 2 * 3 / 4), ("ALL_GATHER", 3), ("REDUCE_SCATTER", 3 / 4), ("ALL_TO_ALL", 3 / 4), ("ONE_TO_ONE", 1)],
)
def test_what_goes_to_other_slices(kind: str, parts: float) -> None:
    line = next(line for line in TEXT.splitlines() if "%all-reduce.2 =" in line)
    text = TEXT.replace("  ROOT %while.1", SEND.format(1, kind) + "  ROOT %while.1")
    text = text.replace(line, line + "\n" + SEND.format(2, kind).rstrip())
    program, sent = read_program(text, 32, 4), 64 * 8 * 4
    assert [c.loops for c in program.between] == [(), (None, 28)]
    assert program.wire_between([10]) == (1 + 10 * 28) * parts * sent
    assert program.wire([10]) == read_program(TEXT, 32, 4).wire([10]), "apart from what stays inside of a slice"


def test_types_and_names() -> None:
    assert [x.bytes for x in buffers("(s4[3]{0}, pred[2,2]{1,0}, f32[]{:T(128)})")] == [2, 4, 4]
    assert kernel_names('kernel_name = "gmm", kernel_name = "gmm"')["gmm"] == 2
