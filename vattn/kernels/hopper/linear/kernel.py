"""Products of few rows with a large weight on Hopper: the weight is loaded before the input is ready.

Weights depend on nothing: a producer warp fills its ring of tiles with them while the kernel before still runs, and
waits for it only to load the input. So neither the launch, nor the latency of the first bytes, nor small kernels
between two products stop the stream of weights. One program a multiprocessor walks over tiles of features, and its
ring, filled on across their ends, takes most of the shared memory, so that no two of a launch share one.

A tile's columns are spread over the warps, a panel of 128 bytes each; their sums are added at the end of a tile.

The weights must not change: weights that the previous kernel wrote would be read too early.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vattn.kernels.hopper.compat import load_box, take_over, wait_for_previous_kernel


@gluon.jit
def produce(
    weight_boxes, input_boxes, num_tiles, weights, inputs, ready, released, CHUNKS: gl.constexpr,
    PANELS: gl.constexpr, FEATURES: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the tiles of this program, chunk by chunk; the first of them before the input exists."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = (num_tiles - program + programs - 1) // programs * CHUNKS
    early = gl.minimum(steps, STAGES)
    for step in range(0, early):
        # One arrival for both copies of a stage: it is full when the bytes of both are there.
        mbarrier.expect(ready.index(step), BYTES)
        feature = (program + step // CHUNKS * programs) * FEATURES
        load_box(weight_boxes, [step % CHUNKS * PANELS, feature, 0], ready.index(step), weights.index(step))
    wait_for_previous_kernel()
    for step in range(0, early):
        load_box(input_boxes, [step % CHUNKS * PANELS, 0, 0], ready.index(step), inputs.index(step))
    stage = 0
    phase = 0
    for step in range(early, steps):
        mbarrier.wait(released.index(stage), phase)
        mbarrier.expect(ready.index(stage), BYTES)
        feature = (program + step // CHUNKS * programs) * FEATURES
        panel = step % CHUNKS * PANELS
        load_box(weight_boxes, [panel, feature, 0], ready.index(stage), weights.index(stage))
        load_box(input_boxes, [panel, 0, 0], ready.index(stage), inputs.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def consume(
    input_scale, weight_scale, output, num_rows, num_features, num_tiles, weights, inputs, sums, ready, released,
    CHUNKS: gl.constexpr, PANELS: gl.constexpr, FEATURES: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    CODES: gl.constexpr, ROW_SCALES: gl.constexpr, FEATURE_SCALES: gl.constexpr,
):  # fmt: skip
    """Multiply what the ring holds, and write the rows of a tile at its end."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[PANELS, 1, 1], instr_shape=[1, 16, 8])
    WIDTH: gl.constexpr = 4 if CODES else 2
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=WIDTH)
    # A thread holds the sums of all panels.
    ADD: gl.constexpr = gl.BlockedLayout([PANELS, 1, 1], [1, 16, 2], [1, 1, PANELS], [1, 2, 0])
    ADDED: gl.constexpr = gl.SliceLayout(0, ADD)
    place = gl.arange(0, FEATURES, layout=gl.SliceLayout(1, ADDED))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ADDED))[None, :]
    take_over()
    if CODES:
        by_row = gl.load(input_scale + (row if ROW_SCALES else 0 * row), mask=row < num_rows, other=0.0)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        feature = tile * FEATURES + place
        if CODES:
            # Read here: at the end of the tile the product would wait for it.
            by_feature = gl.load(
                weight_scale + (feature if FEATURE_SCALES else 0 * feature), mask=feature < num_features, other=0.0
            )
        total = gl.zeros([PANELS, FEATURES, ROWS], gl.float32, MMA)
        for _ in range(CHUNKS):
            mbarrier.wait(ready.index(stage), phase)
            a = weights.index(stage).load(LEFT)
            b = inputs.index(stage).permute((0, 2, 1)).load(RIGHT)
            mbarrier.arrive(released.index(stage), count=1)
            total = mma_v2(a, b, total)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        sums.store(total)
        result = gl.sum(sums.load(ADD), 0)
        if CODES:
            result = result * by_row * by_feature
        target = output + row.to(gl.int64) * num_features + feature
        gl.store(target, result.to(output.dtype.element_ty), mask=(row < num_rows) & (feature < num_features))


@gluon.jit(do_not_specialize=["num_rows"])
def streamed_kernel(
    weight_boxes, input_boxes, input_scale, weight_scale, output, num_rows, num_features, K: gl.constexpr,
    STAGES: gl.constexpr, CODES: gl.constexpr, ROW_SCALES: gl.constexpr, FEATURE_SCALES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Write `input @ weight.T` `[num_rows, num_features]`. Grid: any number of programs.

    Both tensor maps see their rows as panels of 128 bytes, `[K / columns of a panel, rows, columns]`; a box has one
    panel a warp, and as many rows of the weight as make a tile, or of the input as it may have. What lies beyond the
    tensors is read as zeros. CODES: elements are e4m3. It is launched while the kernel before may still run.
    """
    FEATURES: gl.constexpr = weight_boxes.block_shape[1]
    ROWS: gl.constexpr = input_boxes.block_shape[1]
    PANELS: gl.constexpr = num_warps
    COLUMNS: gl.constexpr = 128 if CODES else 64
    CHUNKS: gl.constexpr = (K + PANELS * COLUMNS - 1) // (PANELS * COLUMNS)
    weights = gl.allocate_shared_memory(weight_boxes.dtype, [STAGES, PANELS, FEATURES, COLUMNS], weight_boxes.layout)
    inputs = gl.allocate_shared_memory(input_boxes.dtype, [STAGES, PANELS, ROWS, COLUMNS], input_boxes.layout)
    sums = gl.allocate_shared_memory(gl.float32, [PANELS, FEATURES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(released.index(i), count=1)
    num_tiles = (num_features + FEATURES - 1) // FEATURES
    gl.warp_specialize(
        [
            (consume, (
                input_scale, weight_scale, output, num_rows, num_features, num_tiles, weights, inputs, sums, ready,
                released, CHUNKS, PANELS, FEATURES, ROWS, STAGES, CODES, ROW_SCALES, FEATURE_SCALES,
            )),
            (produce, (
                weight_boxes, input_boxes, num_tiles, weights, inputs, ready, released, CHUNKS, PANELS, FEATURES,
                PANELS * (FEATURES + ROWS) * 128, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
