"""A generator used as it should not be: steps in steps, interruptions, threads, dropped streams, other caches."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
import torch

import vattn
from vattn import errors
from vattn.config.other_names import (
    DRAFTS,
    EMBEDDER,
    ENABLE,
    ENABLE_ADAPTERS,
    ENABLE_ENCODER_DECODER,
    ENABLE_POOLING,
    ENCODE,
    GENERATOR,
    PROMPT_LOOKUP,
    SAMPLING,
)

pytest.importorskip("transformers")

from tests.generation.generator_support import GREEDY, PROMPTS, Characters, check_empty, make_generator, run_to_end
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, disable, enable, enable_adapters
from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder
from vattn.integrations.transformers.pooling import enable_pooling
from vattn.integrations.transformers.whisper import whisper_task


def test_steps_inside_of_a_step_are_refused(packed: PackedModel, expected: list[list[int]]) -> None:
    """A callback that runs the generator fails its own request; one that cancels ends requests after the step."""
    generator = make_generator(packed)

    def runs(ids: Any, scores: Any) -> bool:
        generator.generate([[1, 2]], GREEDY)
        return False

    def cancels(ids: Any, scores: Any) -> bool:
        generator.cancel(requests[1])
        return False

    wanted = [vattn.Sampling(12, stop_token_ids=(), stopping_criteria=(runs,)), GREEDY, GREEDY]
    requests = [generator.add(prompt, one) for prompt, one in zip(PROMPTS, wanted, strict=False)]
    run_to_end(generator)
    assert [request.state for request in requests] == ["failed", "finished", "finished"]
    assert "a step inside of another" in str(requests[0].error)
    assert [request.output for request in requests[1:]] == expected[1:3]
    wanted[0] = vattn.Sampling(12, stop_token_ids=(), stopping_criteria=(cancels,))
    requests = [generator.add(prompt, one) for prompt, one in zip(PROMPTS, wanted, strict=False)]
    run_to_end(generator)
    assert [request.state for request in requests] == ["finished", "cancelled", "finished"]
    assert [request.output for request in requests] == [
        expected[0],
        expected[1][: len(requests[1].output)],
        expected[2],
    ]


@pytest.mark.parametrize("seed", [None, 7])
def test_an_interrupted_step_is_computed_again(
    packed: PackedModel, expected: list[list[int]], seed: int | None
) -> None:
    """Whatever a step was interrupted in, the tokens are those of an undisturbed run."""
    generator = make_generator(packed)
    count = [0]

    def interrupted(ids: Any, scores: Any) -> bool:
        count[0] += 1
        if count[0] in (3, 4, 11, 12):
            raise KeyboardInterrupt
        return False

    sampling: dict[str, Any] = {} if seed is None else {"temperature": 1.3, "seed": seed}
    plain = vattn.Sampling(12, stop_token_ids=(), **sampling)
    watched = vattn.Sampling(12, stop_token_ids=(), stopping_criteria=(interrupted,), **sampling)
    wanted = [request.output for request in generator.generate(PROMPTS[:4], plain)]
    requests = [
        generator.add(prompt, one) for prompt, one in zip(PROMPTS, [plain, watched, plain, watched], strict=False)
    ]
    raised = 0
    while generator.busy:
        try:
            generator.step()
        except KeyboardInterrupt:
            raised += 1
    assert raised == 4 and [request.output for request in requests] == wanted
    assert seed is not None or wanted == expected[:4]
    check_empty(generator)


def test_streams_that_take_turns_each_get_their_own(packed: PackedModel, expected: list[list[int]]) -> None:
    generator = make_generator(packed)
    streams = [generator.stream([prompt], GREEDY) for prompt in PROMPTS[:2]]
    dropped = generator.stream([PROMPTS[2]], GREEDY)
    got: list[list[int]] = [[], []]
    next(dropped)
    del dropped
    for index in [0, 1, 1, 1, 0] * 20:
        one = next(streams[index], None)
        got[index] += one.tokens if one is not None else ()
    assert got == expected[:2]
    check_empty(generator)


def test_cancelling_from_another_thread(packed: PackedModel) -> None:
    """A cancel during a step ends the request when the step does; a second step at the same time is refused."""
    generator = make_generator(packed)
    problems: list[BaseException] = []

    def elsewhere(ids: Any, scores: Any) -> bool:
        def work() -> None:
            generator.cancel(requests[0])
            try:
                generator.step()
            except errors.RequestError as error:
                problems.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return False

    sampling = vattn.Sampling(12, stop_token_ids=(), stopping_criteria=(elsewhere,))
    requests = [generator.add(prompt, one) for prompt, one in zip(PROMPTS, [GREEDY, sampling], strict=False)]
    run_to_end(generator)
    assert [request.state for request in requests] == ["cancelled", "finished"] and len(problems) == 12


def test_cancelling_what_another_generator_has(packed: PackedModel) -> None:
    """Refused whether it waits or has ended; its own, of every way to end, may be cancelled again."""
    generator = make_generator(packed)
    ended = [*generator.generate([PROMPTS[1], []], GREEDY), generator.add(PROMPTS[1], GREEDY)]
    generator.cancel(ended[2])
    assert [request.state for request in ended] == ["finished", "failed", "cancelled"]
    waiting, other = generator.add(PROMPTS[1], GREEDY), make_generator(packed)
    for request in (*ended, waiting):
        with pytest.raises(errors.RequestError, match="not in this generator"):
            other.cancel(request)
        generator.cancel(request)
    assert waiting.state == "cancelled" and ended[0].state == "finished"


def test_caches_and_models_that_changed_are_refused(expected: list[list[int]]) -> None:
    packed = enable(make_model("llama"), num_blocks=64)
    first, generator = make_generator(packed), make_generator(packed)
    request = first.add(PROMPTS[0], GREEDY)
    with pytest.raises(errors.CacheError, match="another generator"):
        first.step()
    first.cancel(request)
    assert generator.generate(PROMPTS[:1], GREEDY)[0].output == expected[0]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(errors.ConfigError, match="a copy of a generator"):
            copied(generator)
    packed.allocate(num_blocks=8)
    with pytest.raises(errors.CacheError, match="cache was bound again"):
        generator.generate([PROMPTS[1]], GREEDY)
    generator = make_generator(packed)
    disable(packed)
    with pytest.raises(errors.ConfigError, match="enable it again"):
        generator.generate([[1, 2]])
    with pytest.raises(errors.ConfigError, match="took off vattn"):
        vattn.Generator(packed)


def test_training_mode_is_refused_whenever_it_came_and_eval_goes_on(expected: list[list[int]]) -> None:
    """Dropout between steps, or in one module alone, would change tokens without a word."""
    packed = enable(make_model("llama"), num_blocks=64)
    generator, whole = make_generator(packed), packed.model
    request = generator.add(PROMPTS[0], GREEDY)
    generator.step()
    so_far = list(request.output)
    part = whole.model.layers[1].mlp
    for one, words in ((whole, "a model in training mode"), (packed, "in training mode"), (part, "layers.1.mlp' in")):
        one.train()
        calls: list[Any] = [
            lambda: generator.generate([PROMPTS[1]], GREEDY),
            lambda: generator.stream([PROMPTS[1]], GREEDY),
            lambda: generator.add(PROMPTS[1], GREEDY),
            lambda: vattn.calibrate(packed, [[[1, 2]]]),
            lambda: vattn.audit(packed, [[1, 2]]),
            lambda: make_generator(packed),
        ]
        for call in [*calls, *([generator.step] if one is not part else [])]:
            with pytest.raises(errors.ConfigError, match=words):
                call()
        whole.eval()
        packed.eval()
    assert request.output == so_far and request.state == "running" and generator.statistics().waiting == 0
    stream = generator.stream([PROMPTS[1]], GREEDY)
    part.train()
    with pytest.raises(errors.ConfigError, match=r"layers\.1\.mlp' in"):
        next(stream)
    part.eval()
    run_to_end(generator)
    assert request.output == expected[0]
    assert generator.generate([PROMPTS[1]], GREEDY)[0].output == expected[1]
    check_empty(generator)


def test_failed_requests_say_why_and_stop_no_other(packed: PackedModel, expected: list[list[int]]) -> None:
    generator, long = make_generator(packed), list(range(5, 90)) * 2
    wrong = {
        "a prompt of 170 tokens": (long, long),
        "token id 1000000 in a prompt": ([5, 10**6], [5, 10**6]),
        "empty prompt": ([], []),
        r"a prompt of '\[2.5\]'": ([2.5], []),
    }
    prompts = [PROMPTS[0], *(prompt for prompt, _ in wrong.values()), PROMPTS[1]]
    first, *failed, last = generator.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert [first.output, last.result().output] == expected[:2]
    assert repr(last) == "Request(3 + 12 tokens, finished: length)"
    for request, (text, (_, prompt)) in zip(failed, wrong.items(), strict=True):
        assert request.state == "failed" and request.prompt == prompt
        with pytest.raises(errors.RequestError, match=text):
            request.result()
        assert repr(request) == f"Request({len(prompt)} + 0 tokens, failed: RequestError: {request.error})"
    check_empty(generator)


@pytest.mark.parametrize("streams", [False, True])
def test_an_interruption_while_prompts_are_read(packed: PackedModel, streams: bool) -> None:
    """What was queued by then is cancelled."""

    class Slow(Characters):
        def encode(self, text: str) -> list[int]:
            if text == "third":
                raise KeyboardInterrupt
            return super().encode(text)

    generator = make_generator(packed, tokenizer=Slow())
    texts = ["first", "second", "third"]
    with pytest.raises(KeyboardInterrupt):
        list(generator.stream(texts)) if streams else generator.generate(texts)
    check_empty(generator)
    assert generator.generate(["first"], vattn.Sampling(3, stop_token_ids=()))[0].state == "finished"
    assert generator.statistics().prompt_tokens == 5


def test_cancels_of_other_threads_disturb_no_step(packed: PackedModel) -> None:
    generator = make_generator(packed)
    faults: list[BaseException] = []

    def run_steps() -> None:
        try:
            while generator.busy:
                generator.step()
        except BaseException as error:
            faults.append(error)

    kept = [generator.add(prompt, vattn.Sampling(12, stop_token_ids=())) for prompt in PROMPTS[:3]]
    worker = threading.Thread(target=run_steps)
    worker.start()
    while worker.is_alive():
        generator.cancel(generator.add(PROMPTS[3], vattn.Sampling(2, stop_token_ids=())))
        generator.statistics()
    worker.join()
    assert not faults and [len(request.output) for request in kept] == [12, 12, 12]
    check_empty(generator)


@pytest.mark.parametrize(
    ("owner", "options", "says"),
    [
        (vattn.Sampling, {"max_tokens": 3}, r"Sampling\(max_tokens=3\).*write max_new_tokens="),
        (vattn.Sampling, {"temprature": 1.0}, "write temperature="),
        (vattn.Sampling, {"mirostat": 2}, "leave mirostat out"),
        (vattn.Sampling, {"do_sample": True}, r"write temperature=1\.0\.$"),
        (vattn.Sampling, {"do_sample": False}, r"write temperature=0\.$"),
        (vattn.Generator, {"max_tokens": "x" * 99}, r"sampling=vattn\.Sampling\(max_new_tokens=\.\.\.\) in add"),
        (vattn.Generator, {"max_num_seqs": 3}, "write max_num_reqs=3"),
        (vattn.Generator, {"batch_size": 2}, "write max_num_reqs=2"),
        (vattn.Generator, {"max_seq_length": 9}, "write max_seq_len=9"),
        (vattn.Generator, {"max_new_tokens": 3}, r"sampling=vattn\.Sampling\(max_new_tokens=3\) in add"),
        (vattn.Generator, {"max_tokens": 3}, r"sampling=vattn\.Sampling\(max_new_tokens=3\) in add"),
        (enable, {"dtype": torch.float16}, r"write from_pretrained\(dtype=torch\.float16\) before enable"),
        (enable, {"device": "cuda"}, r"write model\.to\('cuda'\) before enable"),
        (enable, {"kv_cache_dtype": "fp8"}, r"cache_config=vattn\.CacheConfig\(cache_dtype='fp8'\)"),
        (enable_encoder_decoder, {"dtype": "fp8"}, "before enable"),
        (enable_pooling, {"pooling": "mean"}, r"write vattn\.Embedder\(model, pooling='mean'\)"),
        (enable_adapters, {"max_loras": 4}, "Allowed: model, max_adapters, .*write max_adapters=4"),
        (vattn.Generator.generate, {"input_ids": [3]}, r"write prompts=\[3\]"),
        (vattn.AsyncGenerator.generate, {"input_ids": [3]}, r"write prompt=\[3\]"),
        (vattn.Attention, {"head_dim": 64}, "write head_size=64"),
        (whisper_task, {"return_timestamps": True}, "write timestamps=True"),
        (vattn.Embedder, {"normalize_embeddings": True}, "write normalise=True"),
        (vattn.Embedder, {"mirostat": 2}, "leave mirostat out"),
        (vattn.DraftModel, {"num_speculative_tokens": 3}, "write num_drafts=3"),
        (vattn.PromptLookup, {"prompt_lookup_max": 3}, "write longest=3"),
    ],
)
def test_unknown_keywords_name_the_right_one(owner: Any, options: dict[str, Any], says: str) -> None:
    given = {"model": None} if "model" in inspect.signature(owner).parameters else {}
    with pytest.raises(errors.UnknownOptionError, match=says):
        owner(**given, **options)


def test_unknown_keywords_list_the_near_names_alone() -> None:
    for name, says in (
        ("top_kk", r"Allowed: top_k, top_p[^.]*\."),
        ("xyz", r"Allowed: the 24 keywords of Sampling, which"),
    ):
        with pytest.raises(errors.UnknownOptionError, match=says) as raised:
            vattn.Sampling(**{name: 1})
        assert len(str(raised.value)) < 160


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (vattn.Sampling, SAMPLING),
        (vattn.Generator, GENERATOR),
        (enable, ENABLE),
        (enable_encoder_decoder, ENABLE_ENCODER_DECODER),
        (enable_pooling, ENABLE_POOLING),
        (enable_adapters, ENABLE_ADAPTERS),
        (vattn.Embedder, EMBEDDER),
        (vattn.Embedder.encode, ENCODE),
        (vattn.DraftModel, DRAFTS),
        (vattn.PromptLookup, PROMPT_LOOKUP),
    ],
)
def test_advice_names_keywords_that_exist(owner: Any, names: dict[str, str]) -> None:
    known = inspect.signature(owner).parameters
    for name, right in names.items():
        assert name not in known
        assert "(" in right.split("=")[0] or right.split("=")[0] in known, (name, right)


def test_refused_values_say_what_to_write() -> None:
    for wrong, says in (
        (lambda: vattn.Generator(None, max_num_reqs=0), "leave max_num_reqs out"),  # type: ignore[arg-type]
        (lambda: vattn.DraftModel(None, num_drafts=100), "Try: pass num_drafts=4"),
        (lambda: vattn.Sampling(grammar="yes|no"), r"grammar=vattn\.Grammar\(regex='yes\|no'\)"),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.ConfigError, match=says):
            wrong()


def test_options_of_sampling_are_not_those_of_a_generator(packed: PackedModel) -> None:
    generator = make_generator(packed)
    own = vattn.AsyncGenerator(generator)
    calls = (generator.add, generator.generate, generator.stream, generator.chat, own.stream, own.generate)
    for call in calls:
        for name in ("max_new_tokens", "max_tokens"):
            with pytest.raises(errors.UnknownOptionError, match=r"write sampling=vattn\.Sampling\(max_new_tokens=5\)"):
                call(PROMPTS[:1], **{name: 5})  # type: ignore[arg-type, operator]
    own.close()
    check_empty(generator)


def test_a_cache_without_a_block_for_requests() -> None:
    with pytest.raises(errors.ConfigError, match=r"a cache of 1 blocks.*2 blocks or more, which take [0-9.]+ KiB"):
        vattn.Generator(enable(make_model("llama"), num_blocks=1))
