"""`vattn.forward_context`: steps of nested blocks, of threads and of tasks."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import vattn
from tests.layers.layer_support import make_inputs, make_layer, make_step
from vattn.errors import MetadataError
from vattn.metadata import forward_context as context


def test_forward_context_gives_the_metadata():
    inputs = make_inputs(5)
    explicit = make_layer()(*inputs, metadata=make_step())
    with vattn.forward_context(make_step()):
        assert torch.equal(make_layer()(*inputs), explicit)


def test_an_argument_wins_over_the_context():
    layer, inputs = make_layer(), make_inputs(5)
    with vattn.forward_context(make_step([5])):
        out = layer(*inputs, metadata=make_step([3, 2]))
    assert torch.equal(out, make_layer()(*inputs, metadata=make_step([3, 2])))


def test_forward_context_nests_and_is_restored_on_exceptions():
    outer, inner = make_step([5]), make_step([3, 2])
    with vattn.forward_context(outer):
        with pytest.raises(KeyError), vattn.forward_context(inner):
            assert context.current_step() is inner
            raise KeyError
        assert context.current_step() is outer
        with vattn.forward_context(None):
            assert context.current_step() is None
        assert context.current_step() is outer
    assert context.current_step() is None


def in_threads(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_threads_run_their_own_steps(compiled):
    layers = [make_layer() for _ in range(2)]
    steps, inputs = [make_step([3, 2]), make_step([5])], [make_inputs(5, seed=seed) for seed in (1, 2)]
    alone = [layer(*args, metadata=step) for layer, args, step in zip(layers, inputs, steps, strict=True)]
    run = vattn.compile(lambda layer, *args: layer(*args)) if compiled else lambda layer, *args: layer(*args)
    both, same = threading.Barrier(2), []

    def work(index):
        with vattn.forward_context(steps[index]):
            for _ in range(4):
                both.wait()
                same.append(torch.equal(run(layers[index], *inputs[index]), alone[index]))

    in_threads(lambda: work(0), lambda: work(1))
    assert same == [True] * 8 and context.current_step() is None


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_a_thread_without_a_step_is_refused_while_another_has_one(compiled):
    layer, inputs, step, caught = make_layer(), make_inputs(5), make_step(), []
    run = vattn.compile(layer) if compiled else layer
    assert not run(*inputs).any()  # No thread has a step: a profiling call.

    def work():
        try:
            run(*inputs)
        except MetadataError as error:
            caught.append(str(error))
        with vattn.forward_context(None):
            caught.append(run(*inputs))
        caught.append(run(*inputs, metadata=step))

    with vattn.forward_context(step):
        in_threads(work)
        assert context.current_step() is step
    assert "without a forward context" in caught[0] and not caught[1].any()
    assert torch.equal(caught[2], layer(*inputs, metadata=step))


def test_forward_context_of_two_tasks_is_refused():
    async def run(step, pauses):
        with vattn.forward_context(step):
            for _ in range(pauses):
                await asyncio.sleep(0)
            assert context.current_step() is step

    async def both():
        return await asyncio.gather(run(make_step(), 3), run(None, 2), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None and isinstance(second, MetadataError) and context.current_step() is None
    asyncio.run(run(make_step(), 1))


def test_a_forward_context_that_has_ended_hinders_no_other():
    async def task_that_outlives_the_block():
        ended = asyncio.Event()

        async def wait_and_enter():
            await ended.wait()
            with vattn.forward_context(step):
                assert context.current_step() is step

        with vattn.forward_context(None):
            task = asyncio.create_task(wait_and_enter())
            await asyncio.sleep(0)
        ended.set()
        await task

    def enter_and_pause():
        with vattn.forward_context(step):
            yield

    def work():
        with vattn.forward_context(None):
            done.append(context.current_step())

    step, done = make_step(), []
    asyncio.run(task_that_outlives_the_block())
    paused = enter_and_pause()
    next(paused)
    for target in (paused.close, work):
        in_threads(target)
    paused = enter_and_pause()
    next(paused)
    other = make_step([5])
    with vattn.forward_context(other):  # One that ends before what began in it.
        paused.close()
        assert context.current_step() is other
    assert context.current_step() is None
    in_threads(work)
    work()
    assert done == [None] * 3


# Options
