"""Parts of a result that the CTAs of a cluster send each other: an inbox in shared memory, and what is made of it.

The compiler knows nothing of the cluster: the inbox is shared memory of an assembly statement, other CTAs' inboxes are
reached by its address there, and only such statements touch it. Those that send keep their order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.decode.triton_kernel import LOWEST_MAXIMUM

OPEN_INBOX = gl.constexpr(
    """
    {
    .shared .align 1024 .b8 vattn_inbox[9216];
    mov.u32 $0, vattn_inbox;
    }
    """
)
"""Room for 16 parts of 128 values, a maximum and a sum each. A multiple of 1024 bytes, so that what the compiler
allocates behind it stays aligned."""

SEND = gl.constexpr(
    """
    {
    .reg .pred is_wanted;
    .reg .b32 place;
    setp.ne.b32 is_wanted, $4, 0;
    mapa.shared::cluster.u32 place, $2, $3;
    @is_wanted st.shared::cluster.f32 [place], $1;
    mov.u32 $0, 0;
    }
    """
)
ARRIVE = gl.constexpr("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;")
WAIT = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
WAIT_FOR_PARTS = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;")
THREAD = gl.constexpr("mov.u32 $0, %tid.x;")
RECEIVE_TWO = gl.constexpr(
    """
    {
    .reg .pred is_mine;
    setp.ne.b32 is_mine, $3, 0;
    @is_mine ld.shared.v2.f32 {$0, $1}, [$2];
    }
    """
)
RECEIVE_FOUR = gl.constexpr(
    """
    {
    .reg .pred is_mine;
    setp.ne.b32 is_mine, $5, 0;
    @is_mine ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];
    }
    """
)
"""Loads of the first threads of a CTA. The others compute the same from what registers hold, and store nothing."""


@gluon.jit
def open_inbox():
    """Return the address of this CTA's inbox. Called once: every call site would make another one."""
    return gl.inline_asm_elementwise(OPEN_INBOX, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(value, place, cta, is_wanted):
    """Store fp32 values at addresses of the inboxes of other CTAs of the cluster."""
    gl.inline_asm_elementwise(
        SEND, "=r,f,r,r,r", [value, place, cta, is_wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_at_cluster_barrier():
    """Arrive at the cluster barrier: everything this CTA sent before is visible to CTAs that wait on it."""
    gl.inline_asm_elementwise(ARRIVE, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_at_cluster_barrier():
    """Wait until every CTA of the cluster has arrived."""
    gl.inline_asm_elementwise(WAIT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_parts(inbox):
    """Wait for the cluster and return the inbox's address: what is loaded from there is loaded afterwards."""
    return gl.inline_asm_elementwise(WAIT_FOR_PARTS, "=r,r", [inbox], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def receive_two(place, is_mine):
    return gl.inline_asm_elementwise(
        RECEIVE_TWO, "=f,=f,r,r", [place, is_mine], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.jit
def receive_four(place, is_mine):
    return gl.inline_asm_elementwise(
        RECEIVE_FOUR, "=f,=f,=f,=f,r,r", [place, is_mine],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def add_part(x0, x1, x2, x3, total, place, part_maximum, part_total, maximum, is_mine, VECTOR: gl.constexpr):
    """Add a part to VECTOR columns and to the total."""
    weight = gl.exp2(part_maximum - maximum)
    total += part_total * weight
    if VECTOR == 4:
        y0, y1, y2, y3 = receive_four(place, is_mine)
        x2 += y2 * weight
        x3 += y3 * weight
    else:
        y0, y1 = receive_two(place, is_mine)
    x0 += y0 * weight
    x1 += y1 * weight
    return x0, x1, x2, x3, total


@gluon.jit
def receive(
    inbox, sink, value_factor, CLUSTER: gl.constexpr, HEAD_SIZE: gl.constexpr, VECTOR: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Merge the parts that arrived: a thread's first VECTOR columns of four, what to multiply them by, the head's
    maximum and its total.

    `inbox` is what `wait_for_parts` returned: loads depend on nothing else, so that all are on their way at once.
    """
    THREADS: gl.constexpr = HEAD_SIZE // VECTOR
    ROW: gl.constexpr = HEAD_SIZE * 4
    lane = gl.arange(0, THREADS, layout=LANES)
    thread = gl.inline_asm_elementwise(THREAD, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
    is_mine = (thread < THREADS).to(gl.int32)
    maxima = inbox + CLUSTER * ROW + 0 * lane
    sums = maxima + CLUSTER * 4
    maximum = gl.maximum(gl.zeros_like(lane).to(gl.float32) + sink, LOWEST_MAXIMUM)
    for part in gl.static_range(0, CLUSTER, 4):
        m0, m1, m2, m3 = receive_four(maxima + part * 4, is_mine)
        maximum = gl.maximum(maximum, gl.maximum(gl.maximum(m0, m1), gl.maximum(m2, m3)))
    total = gl.exp2(sink - maximum)
    x0 = gl.zeros_like(maximum)
    x1 = x0
    x2 = x0
    x3 = x0
    place = inbox + lane * (4 * VECTOR)
    for part in gl.static_range(0, CLUSTER, 4):
        m0, m1, m2, m3 = receive_four(maxima + part * 4, is_mine)
        l0, l1, l2, l3 = receive_four(sums + part * 4, is_mine)
        at = place + part * ROW
        x0, x1, x2, x3, total = add_part(x0, x1, x2, x3, total, at, m0, l0, maximum, is_mine, VECTOR)
        x0, x1, x2, x3, total = add_part(x0, x1, x2, x3, total, at + ROW, m1, l1, maximum, is_mine, VECTOR)
        x0, x1, x2, x3, total = add_part(x0, x1, x2, x3, total, at + 2 * ROW, m2, l2, maximum, is_mine, VECTOR)
        x0, x1, x2, x3, total = add_part(x0, x1, x2, x3, total, at + 3 * ROW, m3, l3, maximum, is_mine, VECTOR)
    norm = value_factor / gl.where(total == 0.0, 1.0, total)
    return x0, x1, x2, x3, norm, maximum, total
