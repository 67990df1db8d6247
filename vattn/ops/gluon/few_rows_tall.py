"""Products of 9 to 32 rows on Hopper, whose weights are on their way before their input is, in tall tiles of features.

With 256 features a tile the input, which every tile reads whole, is an eighth of the weights, and the tensor cores take
both from shared memory. There are then fewer tiles than multiprocessors, so the CTAs of a cluster share a tile: each
multiplies its part of the columns, and sends every other the sums of that one's features.

All warps load and multiply: while one stage is multiplied, the one before it is filled again. The barriers of the
cluster are those of `decode_cluster`: before anything is sent every CTA has begun, and once all have sent each touches
its own memory alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from vattn.ops.gluon.cluster_inbox import arrive_at_cluster_barrier, wait_at_cluster_barrier
from vattn.ops.gluon.compat import block_barrier, load_box, take_over

OPEN_SUMS = gl.constexpr(
    """
    {
    .shared .align 1024 .b8 vattn_sums[36864];
    mov.u32 $0, vattn_sums;
    }
    """
)
"""Room for the sums of 256 features of 32 rows, each feature 4 words longer than it is so that banks differ."""

SEND_TWO = gl.constexpr(
    """
    {
    .reg .b32 place;
    mapa.shared::cluster.u32 place, $4, $6;
    st.shared::cluster.v2.f32 [place], {$2, $3};
    mov.u32 $0, 0;
    mov.u32 $1, 0;
    }
    """
)
RECEIVE_FOUR = gl.constexpr("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];")

PAD = gl.constexpr(4)


@gluon.jit
def open_sums():
    """Return the address of this CTA's inbox. Called once: every call site would make another one."""
    return gl.inline_asm_elementwise(OPEN_SUMS, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_two(value, place, cta):
    """Store two neighbours at once at the address of the first, in the inbox of a CTA of the cluster."""
    gl.inline_asm_elementwise(
        SEND_TWO, "=r,=r,f,f,r,r,r,r", [value, place, cta], dtype=gl.int32, is_pure=False, pack=2
    )  # fmt: skip


@gluon.jit
def receive_four(place):
    """Load four neighbours at once from the address of the first."""
    return gl.inline_asm_elementwise(
        RECEIVE_FOUR, "=f,=f,=f,=f,r,r,r,r", [place], dtype=gl.float32, is_pure=False, pack=4
    )  # fmt: skip


@gluon.jit
def load_weights(boxes, step, first, count, group, groups, stage, ready, weights, BYTES: gl.constexpr):
    """Start the copy of a step's weights, and announce that of its input: one barrier for both."""
    FEATURES: gl.constexpr = boxes.block_shape[0]
    COLUMNS: gl.constexpr = boxes.block_shape[1]
    mbarrier.expect(ready.index(stage), BYTES)
    place = [(group + step // count * groups) * FEATURES, (first + step % count) * COLUMNS]
    load_box(boxes, place, ready.index(stage), weights.index(stage))


@gluon.jit
def load_inputs(boxes, step, first, count, stage, ready, inputs):
    COLUMNS: gl.constexpr = boxes.block_shape[1]
    load_box(boxes, [0, (first + step % count) * COLUMNS], ready.index(stage), inputs.index(stage))


@gluon.jit
def exchange(total, inbox, rank, CLUSTER: gl.constexpr, MMA: gl.constexpr, FINAL: gl.constexpr):
    """Send the sums of each CTA's features there, and return those of this one's, of all columns, in FINAL."""
    FEATURES: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    OWN: gl.constexpr = FEATURES // CLUSTER
    LINE: gl.constexpr = (ROWS + PAD) * 4
    feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(1, MMA))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))[None, :]
    place = inbox + (rank * OWN + feature % OWN) * LINE + row * 4
    wait_at_cluster_barrier()
    send_two(total, place, feature // OWN + 0 * row)
    arrive_at_cluster_barrier()
    wait_at_cluster_barrier()
    own = gl.arange(0, OWN, layout=gl.SliceLayout(1, FINAL))[:, None]
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(0, FINAL))[None, :]
    result = gl.zeros([OWN, ROWS], gl.float32, FINAL)
    for part in gl.static_range(CLUSTER):
        result += receive_four(inbox + (part * OWN + own) * LINE + line * 4)
    return result


@gluon.jit(do_not_specialize=["num_rows"])
def tall_kernel(
    weight_boxes, input_boxes, input_scale, weight_scale, output, num_rows, num_features,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr, CODES: gl.constexpr, ROW_SCALES: gl.constexpr,
    FEATURE_SCALES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Write `input @ weight.T` `[num_rows, num_features]`. Grid: clusters of CLUSTER CTAs; as many as tiles, or with
    clusters of one any number. Boxes: 128 bytes of the rows of a tile, and of the input. CHUNKS: of those in a row.

    CODES: elements are e4m3. It is launched while the kernel before may still run.
    """
    FEATURES: gl.constexpr = weight_boxes.block_shape[0]
    ROWS: gl.constexpr = input_boxes.block_shape[0]
    COLUMNS: gl.constexpr = weight_boxes.block_shape[1]
    OWN: gl.constexpr = FEATURES // CLUSTER
    BYTES: gl.constexpr = (FEATURES + ROWS) * 128
    DEPTH: gl.constexpr = 32 if CODES else 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, DEPTH]
    )
    # Neighbouring threads have neighbouring features, as the output has.
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, num_warps], [1, 0])
    FINAL: gl.constexpr = SPREAD if CLUSTER > 1 else MMA
    weights = gl.allocate_shared_memory(weight_boxes.dtype, [STAGES, FEATURES, COLUMNS], weight_boxes.layout)
    inputs = gl.allocate_shared_memory(input_boxes.dtype, [STAGES, ROWS, COLUMNS], input_boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    block_barrier()
    rank = gl.program_id(0) % CLUSTER
    group = gl.program_id(0) // CLUSTER
    groups = gl.num_programs(0) // CLUSTER
    inbox = 0
    if CLUSTER > 1:
        inbox = open_sums()
        arrive_at_cluster_barrier()
    num_tiles = (num_features + FEATURES - 1) // FEATURES
    first = rank * CHUNKS // CLUSTER
    count = (rank + 1) * CHUNKS // CLUSTER - first
    steps = (num_tiles - group + groups - 1) // groups * count
    early = gl.minimum(steps, STAGES)
    for step in range(0, early):
        load_weights(weight_boxes, step, first, count, group, groups, step, ready, weights, BYTES)
    # A box behind the last column reads nothing, but what describes the input is here before the input is.
    mbarrier.expect(ready.index(STAGES), ROWS * 128)
    load_box(input_boxes, [0, CHUNKS * COLUMNS], ready.index(STAGES), inputs.index(0))
    take_over()
    mbarrier.wait(ready.index(STAGES), 0)
    for step in range(0, early):
        load_inputs(input_boxes, step, first, count, step, ready, inputs)
    own = gl.arange(0, OWN, layout=gl.SliceLayout(1, FINAL))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, FINAL))[None, :]
    if CODES:
        by_row = gl.load(input_scale + (row if ROW_SCALES else 0 * row), mask=row < num_rows, other=0.0)
    stage = 0
    phase = 0
    done = 0
    ahead = early
    started = 0
    for tile in range(group, num_tiles, groups):
        feature = tile * FEATURES + rank * OWN + own
        if CODES:
            # Read here: at the end of the tile the product would wait for it.
            by_feature = gl.load(
                weight_scale + (feature if FEATURE_SCALES else 0 * feature), mask=feature < num_features, other=0.0
            )
        total = gl.zeros([FEATURES, ROWS], gl.float32, MMA)
        for _ in range(0, count):
            mbarrier.wait(ready.index(stage), phase)
            total = warpgroup_mma(weights.index(stage), inputs.index(stage).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            # Every warp is done with the stage before.
            block_barrier()
            if (started > 0) & (ahead < steps):
                load_weights(weight_boxes, ahead, first, count, group, groups, done, ready, weights, BYTES)
                load_inputs(input_boxes, ahead, first, count, done, ready, inputs)
                ahead += 1
            started = 1
            done = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        if CLUSTER > 1:
            result = exchange(total, inbox, rank, CLUSTER, MMA, FINAL)
        else:
            # A sum, for rounding right behind the last product would have all of them wait for one another.
            result = total + 0.0
        if CODES:
            result = result * by_row * by_feature
        target = output + row.to(gl.int64) * num_features + feature
        gl.store(target, result.to(output.dtype.element_ty), mask=(row < num_rows) & (feature < num_features))
