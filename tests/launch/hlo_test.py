"""Collectives in compiled programs, compared with counts by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import P

from difftx.launch.hlo import list_collectives, replica_groups, type_bytes

ROWS = 16  # float32 numbers on each of eight devices, 64 bytes.


def compiled(body, devices=8):
    """Return the HLO of `body`, compiled for 16 numbers on each device."""
    mesh = jax.make_mesh((devices,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:devices])
    numbers = jax.ShapeDtypeStruct((ROWS * devices,), jnp.float32, sharding=jax.NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        call = jax.shard_map(body, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return jax.jit(call).lower(numbers).compile().as_text()


def gather(x):
    return jnp.tanh(jax.lax.all_gather(x, "x", tiled=True)).reshape(8, -1).sum(0)


def repeat(times, function):
    return lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, length=times)[0]


def sent(text):
    totals = {}
    for c in list_collectives(text):
        totals[c.kind] = totals.get(c.kind, 0) + c.sent_bytes
    return totals


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (gather, {"all-gather": 7 * 64}),
        (lambda x: x * jax.lax.psum(x, "x"), {"all-reduce": 2 * 64 * 7 / 8}),
        (lambda x: jnp.tile(jax.lax.psum_scatter(x, "x", tiled=True), 8), {"reduce-scatter": 64 * 7 / 8}),
        (lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), {"all-to-all": 64 * 7 / 8}),
        (lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]), {"collective-permute": 64}),
        (lambda x: 2 * x, {}),
    ],
)
def test_bytes_that_a_device_sends(body, expected):
    assert sent(compiled(body)) == expected


@pytest.mark.parametrize(
    ("body", "inside", "between"),
    [
        # Two hosts with four GPUs each. A ring over all GPUs leaves a host through the adapters of its four GPUs.
        (gather, 7 * 64, 7 * 64 / 4),
        # Each GPU keeps 1/8 of its numbers and sends 4/8 of them to the other host.
        (lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), 64 * 7 / 8, 64 * 4 / 8),
        # Groups with one GPU of each host, and groups within a host.
        (lambda x: jax.lax.psum(x, "x", axis_index_groups=[[i, i + 4] for i in range(4)]), 0, 2 * 64 / 2),
        (lambda x: jax.lax.psum(x, "x", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), 2 * 64 * 3 / 4, 0),
    ],
    ids=["all", "all-to-all", "across", "within"],
)
def test_gpu_hosts_share_the_network(body, inside, between):
    (found,) = list_collectives(compiled(body), host_devices=4)
    assert (found.interconnect_bytes, found.network_bytes) == (inside, between)


def test_a_loop_counts_as_often_as_it_runs():
    assert sent(compiled(repeat(5, gather))) == {"all-gather": 5 * 7 * 64}
    assert sent(compiled(repeat(3, repeat(5, gather)))) == {"all-gather": 15 * 7 * 64}


def test_a_loop_without_a_known_trip_count():
    text = compiled(repeat(5, gather))
    assert "known_trip_count" in text
    assert sent(text.replace("known_trip_count", "dropped")) == {"all-gather": 5 * 7 * 64}


def test_a_loop_whose_counter_grows_by_two():
    gathers = repeat(6, lambda x: gather(gather(x)))
    text = compiled(gathers).replace("known_trip_count", "dropped")
    for line in text.splitlines():  # Only the increment of the counter adds 1 to an integer.
        if "s32[] constant(1)" in line:
            text = text.replace(line, line.replace("constant(1)", "constant(2)"))
    assert sent(text) == {"all-gather": 3 * 2 * 7 * 64}


def test_a_conditional_counts_the_branch_that_sends_most():
    def body(x):
        return jax.lax.cond(x[0] > 0, repeat(3, gather), gather, x)

    assert sent(compiled(body)) == {"all-gather": 3 * 7 * 64}


def test_collectives_inside_calls_count():
    @functools.partial(jax.jit, inline=False)
    def inner(x):
        return gather(x)

    assert sent(compiled(lambda x: inner(inner(x)))) == {"all-gather": 2 * 7 * 64}


def module(*body, computations=""):
    lines = "\n".join(f"  {line}" for line in body)
    return f"HloModule m, num_partitions=8\n\n{computations}ENTRY %main (p: bf16[4,8]) -> bf16[8,8] {{\n{lines}\n}}\n"


@pytest.mark.parametrize(
    "branches", ["branch_computations={%gather, %reduce}", "true_computation=%reduce, false_computation=%gather"]
)
def test_the_branches_of_a_conditional_are_compared_by_what_they_send(branches):
    """An all-gather of 64 bytes sends 7 · 64 bytes, and an all-reduce of 128 bytes sends 2 · 128 · 7 / 8 bytes."""
    gather = "%gather (q: bf16[4,8]) -> bf16[32,8] {\n  %q = bf16[4,8]{1,0} parameter(0)\n"
    gather += "  ROOT %g = bf16[32,8]{1,0} all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}\n}\n\n"
    reduce = "%reduce (r: bf16[8,8]) -> bf16[8,8] {\n  %r = bf16[8,8]{1,0} parameter(0)\n"
    reduce += "  ROOT %a = bf16[8,8]{1,0} all-reduce(%r), replica_groups=[1,8]<=[8], to_apply=%add\n}\n\n"
    text = module(
        "%p = bf16[4,8]{1,0} parameter(0)",
        f"ROOT %c = bf16[8,8]{{1,0}} conditional(%p, %p, %p), {branches}",
        computations=gather + reduce,
    )
    assert sent(text) == {"all-gather": 7 * 64}


def test_an_asynchronous_pair_counts_once():
    pair = module(
        "%p = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)",
        "%s = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={0}",
        "ROOT %d = bf16[8,8]{1,0} all-gather-done(%s)",
    )
    assert sent(pair) == {"all-gather": 64}


def test_an_asynchronous_computation_counts_once():
    wrapped = "%wrapped (q: bf16[4,8]) -> bf16[2,8] {\n  %q = bf16[4,8]{1,0} parameter(0)\n"
    wrapped += (
        "  ROOT %r = bf16[2,8]{1,0} reduce-scatter(%q), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%a\n}\n\n"
    )
    text = module(
        "%p = bf16[4,8]{1,0} parameter(0)",
        "%s = ((bf16[4,8]), bf16[2,8], u32[]) async-start(%p), calls=%wrapped",
        "%u = ((bf16[4,8]), bf16[2,8], u32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = bf16[2,8]{1,0} async-done(%u), calls=%wrapped",
        computations=wrapped,
    )
    assert sent(text) == {"reduce-scatter": 32}


def test_a_collective_spread_over_fusions_counts_once():
    """libtpu spreads a gather over the fusions of a loop. Each fusion repeats the instruction."""

    def part(name, target):
        gather = "%g = bf16[8,8]{1,0} all-gather(%q), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}"
        last = f'ROOT %c = bf16[8,8]{{1,0}} custom-call(%g), custom_call_target="{target}"'
        lines = ["%q = bf16[4,8]{1,0} parameter(0)", gather, last]
        return f"%{name} (q: bf16[4,8]) -> bf16[8,8] {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n\n"

    names = {"fused.1": "AsyncCollectiveStart", "async_collective_fusion.2": "Other", "fused.3": "AsyncCollectiveDone"}
    text = module(
        "%p = bf16[4,8]{1,0} parameter(0)",
        *(f"%f{i} = bf16[8,8]{{1,0}} fusion(%p), kind=kCustom, calls=%{name}" for i, name in enumerate(names)),
        computations="".join(part(*item) for item in names.items()),
    )
    assert sent(text) == {"all-gather": 64}


def test_a_fused_all_reduce_and_slice_count_as_a_reduce_scatter():
    fused = "%all-reduce-scatter.1 (q: bf16[4,8]) -> bf16[2,8] {\n  %q = bf16[4,8]{1,0} parameter(0)\n"
    fused += "  %r = bf16[4,8]{1,0} all-reduce(%q), replica_groups=[4,2]<=[8], to_apply=%a\n"
    fused += "  ROOT %c = bf16[2,8]{1,0} slice(%r), slice={[0:2], [0:8]}\n}\n\n"
    text = module(
        "%p = bf16[4,8]{1,0} parameter(0)",
        "ROOT %f = bf16[2,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
        computations=fused,
    )
    assert sent(text) == {"reduce-scatter": 32}


@pytest.mark.parametrize(
    ("kind", "slices", "sent_bytes"),
    [("ALL_REDUCE", "1,2", 64), ("ALL_GATHER", "1:4", 3 * 64), ("REDUCE_SCATTER", "1,3:5", 64 * 3 / 4)],
)
def test_host_transfers_of_libtpu_count_between_slices(kind, slices, sent_bytes):
    attributes = f'_xla_megascale_target="{{{slices}}}x{{0:3}}",_xla_megascale_transfer_type="{kind}"'
    text = module(
        "%p = bf16[4,8]{1,0} parameter(0)",
        "%t = token[] after-all()",
        f"%s = (bf16[4,8], u32[], token[]) send(%p, %t), is_host_transfer=true, frontend_attributes={{{attributes}}}",
        "ROOT %d = token[] send-done(%s), channel_id=1",
    )
    (found,) = list_collectives(text)
    assert (found.between_slices, found.sent_bytes) == (True, sent_bytes)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, a=1", [[0, 2], [1, 3]]),
        ("replica_groups={}, a=1", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4], a=1", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), a=1", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, a=1", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, a=1", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}, a=1", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, a=1", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}, a=1", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, a=1", [[0, 2], [1, 3]]),
    ],
)
def test_every_notation_of_groups(text, groups):
    assert replica_groups(text, devices=4).tolist() == groups


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("bf16[4,8]{1,0:T(8,128)(2,1)S(1)}", 64),
        ("(f32[], /*index=1*/s32[2,3]{1,0})", 28),
        ("pred[7]", 7),
        ("s4[10]{0:E(4)}", 5),
        ("f8e4m3fn[3]", 3),
        ("f32[<=5]", 20),
    ],
)
def test_the_bytes_of_a_type_are_those_of_its_elements(text, size):
    assert type_bytes(text) == size
