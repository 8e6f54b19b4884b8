"""Optimized HLO text: loops and trips, cycles, kernels, collectives, copies of the cache."""

from __future__ import annotations

import pytest

from jaxllm.planning import hlo

CYCLES = ', backend_config={{"window_config":{{"estimated_cycles":"{}","iteration_bounds":["1"]}}}}'
KV = "bf16[6,32,64]{2,1,0:T(8,128)(2,1)}"
OTHER_LAYOUT = "bf16[6,32,64]{1,2,0:T(8,128)(2,1)}"
FAST_MEMORY = "bf16[6,32,64]{2,1,0:T(8,128)(2,1)S(1)}"

# A decode loop as XLA prints it for a TPU: a serial write of the cache inside of it, a branch, an
# all-reduce, and the cache in another layout at the beginning.
TPU = f"""HloModule jit_decode, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%fused (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0:T(128)}} parameter(0)
  ROOT %neg = f32[8]{{0:T(128)}} negate(%p)
}}

%write (w: (s32[], bf16[6,32,64])) -> (s32[], bf16[6,32,64]) {{
  %w = (s32[]{{:T(128)}}, {KV}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%w), index=0
  %kv = {KV} get-tuple-element(%w), index=1
  %one = s32[]{{:T(128)}} constant(1)
  %next = s32[]{{:T(128)}} add(%i, %one)
  %update = {KV} dynamic-update-slice(%kv, %kv, %i, %i, /*index=4*/%i){CYCLES.format(100)}
  ROOT %out = (s32[]{{:T(128)}}, {KV}) tuple(%next, %update)
}}

%written (c: (s32[], bf16[6,32,64])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(6), metadata={{op_name="jit(decode)/while"}}
  %c = (s32[]{{:T(128)}}, {KV}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%j, %limit), direction=LT
}}

%cheap (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0:T(128)}} parameter(0)
  ROOT %y = f32[8]{{0:T(128)}} copy(%x){CYCLES.format(5)}
}}

%dear (x.1: f32[8]) -> f32[8] {{
  %x.1 = f32[8]{{0:T(128)}} parameter(0)
  ROOT %y.1 = f32[8]{{0:T(128)}} fusion(%x.1), kind=kLoop, calls=%fused{CYCLES.format(40)}
}}

%body (s: (s32[], bf16[6,32,64], f32[8])) -> (s32[], bf16[6,32,64], f32[8]) {{
  %s = (s32[]{{:T(128)}}, {KV}, f32[8]{{0:T(128)}}) parameter(0)
  %n = s32[]{{:T(128)}} get-tuple-element(%s), index=0
  %cache = {KV} get-tuple-element(%s), index=1
  %h = f32[8]{{0:T(128)}} get-tuple-element(%s), index=2
  %start = (s32[]{{:T(128)}}, {KV}) tuple(%n, %cache)
  %loop = (s32[]{{:T(128)}}, {KV}) while(%start), condition=%written, body=%write
  %kv.2 = {KV} get-tuple-element(%loop), index=1
  %either = f32[8]{{0:T(128)}} conditional(%n, %h, %h), branch_computations={{%cheap, %dear}}
  %ar = f32[8]{{0:T(128)}} all-reduce-start(%either), to_apply=%add{CYCLES.format(7)}
  %done = f32[8]{{0:T(128)}} all-reduce-done(%ar)
  ROOT %again = (s32[]{{:T(128)}}, {KV}, f32[8]{{0:T(128)}}) tuple(%n, %kv.2, %done)
}}

%more (m: (s32[], bf16[6,32,64], f32[8])) -> pred[] {{
  %m = (s32[]{{:T(128)}}, {KV}, f32[8]{{0:T(128)}}) parameter(0)
  ROOT %yes = pred[]{{:T(512)}} constant(true)
}}

ENTRY %main (k: bf16[6,32,64], z: f32[8]) -> bf16[6,32,64] {{
  %k = {OTHER_LAYOUT} parameter(0)
  %z = f32[8]{{0:T(128)}} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  %relaid = {KV} copy(%k){CYCLES.format(9999)}
  %move = ({FAST_MEMORY}, {KV}, u32[]{{:S(2)}}) copy-start(%relaid)
  %moved = {FAST_MEMORY} copy-done(%move)
  %init = (s32[]{{:T(128)}}, {KV}, f32[8]{{0:T(128)}}) tuple(%zero, %relaid, %z)
  %decode = (s32[]{{:T(128)}}, {KV}, f32[8]{{0:T(128)}}) while(%init), condition=%more, body=%body
  ROOT %result = {KV} get-tuple-element(%decode), index=1
}}
"""
CACHE = {("bfloat16", 6 * 32 * 64)}


@pytest.fixture
def module() -> hlo.Module:
    return hlo.Module.parse(TPU)


def test_the_decode_loop_is_the_largest_outermost_one(module: hlo.Module) -> None:
    assert module.entry == "main"
    assert module.main_loop() == "body"


def test_trips_are_read_from_the_condition(module: hlo.Module) -> None:
    loops = {x.name: x for x in module.reachable("main") if x.opcode == "while"}
    assert module.trips(loops["loop"]) == 6
    assert module.trips(loops["decode"]) is None


def test_trips_that_xla_states() -> None:
    stated = TPU.replace(
        "body=%write", 'body=%write, backend_config={"known_trip_count":{"n":"11"}}'
    )
    module = hlo.Module.parse(stated)
    (loop,) = (x for x in module.reachable("body") if x.opcode == "while")
    assert module.trips(loop) == 11


def test_cycles_count_loops_times_their_trips_and_the_dearest_branch(module: hlo.Module) -> None:
    assert hlo.cycles(module, "body") == 6 * 100 + 40 + 7
    assert hlo.cycles(module, "main") == 9999 + 6 * 100 + 40 + 7


def test_kernels_are_what_a_step_launches(module: hlo.Module) -> None:
    # The counter's addition and the write, six times; a branch; the all-reduce, once.
    assert hlo.kernels(module, "body") == 6 * 2 + 1 + 1


def test_loops_and_collectives_of_a_step(module: hlo.Module) -> None:
    assert hlo.inner_loops(module, "body") == 1
    assert hlo.collectives(module, "body") == 1


def test_copies_of_the_cache_but_not_moves_between_memories(module: hlo.Module) -> None:
    assert hlo.array_copies(module, CACHE) == 1
    assert hlo.array_copies(module, {("float32", 6 * 32 * 64)}) == 0
    same_layout = hlo.Module.parse(TPU.replace(OTHER_LAYOUT, FAST_MEMORY))
    assert hlo.array_copies(same_layout, CACHE) == 0


# A GPU's prefill: a fusion that pads and transposes keys into the cache, and one that transposes
# the cache itself after an update.
WRITES = """HloModule jit_prefill

%written (keys: bf16[1,24,4,64]) -> bf16[4,48,64] {
  %keys = bf16[1,24,4,64]{3,2,1,0} parameter(0)
  %rows = bf16[24,4,64]{2,1,0} bitcast(%keys)
  %zero = bf16[] constant(0)
  %padded = bf16[48,4,64]{2,1,0} pad(%rows, %zero), padding=0_24x0_0x0_0
  ROOT %turned = bf16[4,48,64]{2,1,0} transpose(%padded), dimensions={1,0,2}
}

%copied (cache: bf16[4,48,64], new: bf16[4,1,64], i: s32[]) -> bf16[48,4,64] {
  %cache = bf16[4,48,64]{2,1,0} parameter(0)
  %new = bf16[4,1,64]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %updated = bf16[4,48,64]{2,1,0} dynamic-update-slice(%cache, %new, %i, %i, %i)
  ROOT %other = bf16[48,4,64]{2,1,0} transpose(%updated), dimensions={1,0,2}
}

ENTRY %main (k: bf16[1,24,4,64], n: bf16[4,1,64], j: s32[]) -> bf16[48,4,64] {
  %k = bf16[1,24,4,64]{3,2,1,0} parameter(0)
  %n = bf16[4,1,64]{2,1,0} parameter(1)
  %j = s32[] parameter(2)
  %kv = bf16[4,48,64]{2,1,0} fusion(%k), kind=kLoop, calls=%written
  ROOT %last = bf16[48,4,64]{2,1,0} fusion(%kv, %n, %j), kind=kLoop, calls=%copied
}
"""


def test_a_fusion_that_writes_computed_values_into_the_cache_copies_nothing() -> None:
    cache = {("bfloat16", 4 * 48 * 64)}
    assert hlo.array_copies(hlo.Module.parse(WRITES), cache) == 1
    written = WRITES.replace("calls=%copied", "calls=%written")
    only_written = written[: written.index("%copied")] + written[written.index("ENTRY") :]
    assert hlo.array_copies(hlo.Module.parse(only_written), cache) == 0


def test_a_program_without_loops_is_one_step() -> None:
    text = "ENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n"
    module = hlo.Module.parse(text + "  ROOT %y = f32[2]{0} negate(%x)\n}\n")
    assert module.main_loop() == "main"
    assert hlo.kernels(module, "main") == 1


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.Module.parse("module @jit_f {}")


def test_attributes_of_a_kernel_may_span_lines() -> None:
    kernel = (
        'custom-call(%x), frontend_attributes={kernel_metadata={\n"block": "512"\n}}, calls=%no'
    )
    text = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
    text += f"  %k = f32[8]{{0}} {kernel}\n  ROOT %y = f32[8]{{0}} copy(%k){CYCLES.format(7)}\n}}\n"
    module = hlo.Module.parse(text)
    assert [instruction.name for instruction in module.computations["main"]] == ["x", "k", "y"]
    assert hlo.cycles(module, "main") == 7


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[8,16] all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}", 512 * 3 / 4),
        ("bf16[4] reduce-scatter(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", 2 * 8 / 2),
        ("(f32[8], bf16[2]) all-reduce(%x, %y), replica_groups={}, to_apply=%add", 2 * 36 * 7 / 8),
        ("(f32[2,16], f32[8,16]) all-gather-start(%x), replica_groups=[2,4]<=[8]", 512 * 3 / 4),
        ("f32[8] all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add", 2 * 32 * 3 / 4),
        ("(f32[8], f32[8]) collective-permute-start(%x), source_target_pairs={{0,1}}", 32),
        ("f32[8] all-gather-done(%x)", 0),
        ("f32[8] add(%x, %y)", 0),
    ],
)
def test_bytes_that_a_device_sends(line: str, expected: float) -> None:
    instruction = hlo.read_instruction(f"  %it = {line}")
    assert instruction is not None
    assert hlo.transferred_bytes(instruction, 8) == pytest.approx(expected)


def test_operations_without_an_estimate() -> None:
    text = TPU.replace(
        "%ar = f32[8]",
        '%k = f32[8]{0:T(128)} custom-call(%either), custom_call_target="tpu_custom_call"\n'
        '  %b = f32[8]{0:T(128)} custom-call(), custom_call_target="AllocateBuffer"\n'
        "  %ar = f32[8]",
    )
    module = hlo.Module.parse(text)
    (found,) = hlo.uncosted(module, "body").items()
    (operand,) = [x for x in module.computations["body"] if x.name == "either"]
    read = sum(x.nbytes for x in hlo.array_types(operand.type))
    assert found == ("tpu_custom_call", (1, read + 32))
    scatter = text.replace(
        "%k = f32[8]{0:T(128)} custom-call(%either)",
        "%u = f32[2]{0} constant({1, 2})\n  %i = s32[2]{0} constant({0, 1})\n"
        "  %k = f32[8]{0:T(128)} scatter(%either, %i, %u)",
    )
    # The updates are read and written, the indices read, and the array is not.
    assert hlo.uncosted(hlo.Module.parse(scatter), "body") == {"scatter": (1, 8 + 8 + 8)}


def test_times_of_both_branches() -> None:
    text = """HloModule m

%fast (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}

%slow (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} fusion(%b), kind=kLoop, backend_config={"estimated_cycles":"500"}
}

ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%fast, false_computation=%slow
}
"""
    assert hlo.branch_cycles(hlo.Module.parse(text), "main") == [[0, 500]]
