"""Misspelt names of arguments are refused with our own error, which says what was meant."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn

import vattn
from vattn.config.arguments import known_keywords, meant
from vattn.distributed import ContextParallel
from vattn.errors import ArgumentsError, ConfigError, ScaleError, UnknownOptionError, VattnError


def builder(**options):
    return vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=16, block_size=8, **options)


def flash_builder(**options):
    return vattn.FlashAttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=16, **options)


MISSPELT = {
    "CacheConfig": (lambda: vattn.CacheConfig(blocksize=8), "CacheConfig", "blocksize", "block_size"),
    "QuantConfig": (lambda: vattn.QuantConfig(kscale=1.0), "QuantConfig", "kscale", "k_scale"),
    "options": (lambda: vattn.options(strikt=True), "options", "strikt", "strict"),
    "enable": (lambda: vattn.enable(output_format=["fp8_static"]), "enable", "output_format", "output_formats"),
    "compile": (lambda: vattn.compile(abs, fulgraph=True), "vattn.compile", "fulgraph", "fullgraph"),
    "compile_regions": (
        lambda: vattn.compile_regions([nn.Identity()], dynamics=True),
        "vattn.compile_regions",
        "dynamics",
        "dynamic",
    ),
    "context parallelism": (
        lambda: ContextParallel.of(interlave=4),
        "ContextParallel.of",
        "interlave",
        "interleave",
    ),
    "its class": (lambda: ContextParallel(0, 2, interlave=4), "ContextParallel", "interlave", "interleave"),
    "a builder": (lambda: builder(layer=None), "AttentionMetadataBuilder", "layer", "layers"),
    "build": (lambda: builder().build([1], seq_len=[1]), "AttentionMetadataBuilder.build", "seq_len", "seq_lens"),
    "advance": (lambda: builder().advance(None, blocks=[]), "AttentionMetadataBuilder.advance", "blocks", "new_blocks"),
    "add": (lambda: vattn.Generator.add(None, [1], samplin=None), "Generator.add", "samplin", "sampling"),
    "stream": (
        lambda: vattn.Generator.stream(None, [[1]], samplings=None),
        "Generator.stream",
        "samplings",
        "sampling",
    ),
    "generate": (lambda: vattn.Generator.generate(None, [[1]], progres=1), "Generator.generate", "progres", "progress"),
    "a builder of other steps": (lambda: flash_builder(layer=None), "FlashAttentionMetadataBuilder", "layer", "layers"),
    "its build": (
        lambda: flash_builder().build([1], seq_len=[1]),
        "FlashAttentionMetadataBuilder.build",
        "seq_len",
        "seq_lens",
    ),
    "a layer": (lambda: vattn.Attention(2, 16, 0.25, windows=5), "Attention", "windows", "per_layer_sliding_window"),
    "words": (
        lambda: vattn.AttentionMetadataBuilder(max_reqs=3),
        "AttentionMetadataBuilder",
        "max_reqs",
        "max_num_reqs",
    ),
    "a cache": (lambda: vattn.allocate_kv_cache(None, num_block=3), "allocate_kv_cache", "num_block", "num_blocks"),
    "a pool": (lambda: vattn.BlockPool(num_block=3), "BlockPool", "num_block", "num_blocks"),
    "vision": (
        lambda: vattn.MMEncoderAttention(8, 40, 0.1, num_kv_head=3),
        "MMEncoderAttention",
        "num_kv_head",
        "num_kv_heads",
    ),
    "boundaries": (lambda: vattn.boundary_layers(num_layer=1), "boundary_layers", "num_layer", "num_layers"),
    "graphs": (
        lambda: vattn.CUDAGraphRunner(batch_size=[1]),
        "CUDAGraphRunner",
        "batch_size",
        "batch_sizes",
    ),
    "warmup": (lambda: vattn.warmup(None, decode_batch=[1]), "warmup", "decode_batch", "decode_batches"),
}


def test_inherited_methods_are_told_by_the_class_that_was_called() -> None:
    with pytest.raises(ArgumentsError, match=r"^MLAAttention without .*kv_b_proj"):
        vattn.MLAAttention(4, 0.1)
    builder = vattn.TreeAttentionMetadataBuilder(2, 8, 32, tree_choices=[(0,)])
    with pytest.raises(UnknownOptionError, match=r"^TreeAttentionMetadataBuilder\.build got unknown"):
        builder.build([1], [1], [[1]], postions=[3])


@pytest.mark.parametrize(("call", "of", "came", "fix"), MISSPELT.values(), ids=MISSPELT.keys())
def test_a_misspelt_name_is_answered_with_the_right_one(call, of, came, fix) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        call()
    assert caught.value.got == f"{of} got unknown option(s) {came}"
    assert fix in caught.value.allowed.split(", ")
    if came != "windows":
        assert fix in caught.value.fix.split(" or ")
    assert isinstance(caught.value, TypeError)


INPUTS = {
    "attention": lambda: vattn.Attention(2, 16, 0.25),
    "sinks": lambda: vattn.StaticSinkAttention(2, 16, 0.25, sink_len=16),
    "cross": lambda: vattn.CrossAttention(2, 16, 0.25),
    "texts": lambda: vattn.EncoderOnlyAttention(2, 16, 0.25),
    "vision": lambda: vattn.MMEncoderAttention(2, 16, 0.25),
    "differential": lambda: vattn.DifferentialAttention(4, 16, 0.25, 2, *[[0.1] * 16] * 4, lambda_init=0.5),
    "latent": lambda: vattn.MLAAttention(2, 0.25, 8, 8, 8, None, 16, nn.Linear(16, 32, bias=False)),
}
"""Layers, and what their calls may have by name."""


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS.keys())
def test_a_layer_without_its_arguments_is_refused(make) -> None:
    layer = type(make())
    with pytest.raises(ArgumentsError, match=f"{layer.__name__} without num_heads"):
        layer()
    with pytest.raises(ArgumentsError, match=f"{layer.__name__} with 40 positional arguments"):
        layer(*range(40))


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS.keys())
def test_a_misspelt_input_of_a_layer_is_refused(make) -> None:
    layer = make()
    rows = [torch.zeros(1, 32)] * 3
    name = "max_seqlen" if isinstance(layer, vattn.MMEncoderAttention) else "metadata"
    with pytest.raises(UnknownOptionError, match=rf"forward got unknown option.*{name[:-1]}.*{name}\.$"):
        layer(*rows, **{name[:-1]: None})


def test_compiled_calls_say_so_too() -> None:
    run = torch.compile(vattn.Attention(2, 16, 0.25), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"forward got unknown option.*metdata.*check the spelling"):
        run(*[torch.zeros(1, 32)] * 3, metdata=None)


def test_names_that_look_like_none() -> None:
    assert meant(["zzz"], ["block_size", "dtype"]) == ""
    assert meant(["max_reqs"], ["max_trees", "max_num_reqs"]) == "max_num_reqs"
    with pytest.raises(UnknownOptionError, match="check the spelling"):
        vattn.CacheConfig(zzz=1)


def test_what_is_checked_stays_what_it_was() -> None:
    config = vattn.CacheConfig(8, cache_dtype="fp8")
    assert config == pickle.loads(pickle.dumps(config))
    assert dataclasses.replace(config, block_size=16) == vattn.CacheConfig(16, "fp8")
    assert [field.name for field in dataclasses.fields(config)][:2] == ["block_size", "cache_dtype"]
    with pytest.raises(ConfigError, match="block_size=7"):
        vattn.CacheConfig(block_size=7)
    with pytest.raises(ArgumentsError, match="build without query_lens"):
        builder().build()
    with pytest.raises(ArgumentsError, match="CacheConfig with 90 positional arguments"):
        vattn.CacheConfig(*range(90))
    assert issubclass(ArgumentsError, TypeError)


def test_methods_and_functions() -> None:
    @known_keywords
    def scaled(value, factor=2):
        """Doc."""
        return value * factor

    assert (scaled(3), scaled(3, factor=4), scaled.__doc__) == (6, 12, "Doc.")
    with pytest.raises(ArgumentsError, match=r"scaled without value. Allowed: value, factor"):
        scaled(factor=4)
    with pytest.raises(UnknownOptionError, match=r"factr.*Allowed: value, factor.*Try: factor"):
        scaled(3, factr=4)
    with pytest.raises(ArgumentsError, match=r"scaled with value by place and by name"):
        scaled(3, value=4)
    with pytest.raises(ArgumentsError, match=r"Attention with head_size by place and by name"):
        vattn.Attention(2, 16, head_size=16)


def test_what_passes_options_on_does_not_know_their_names() -> None:
    with pytest.raises(TypeError, match="takes \\*\\*options"):
        known_keywords(lambda **options: None)


def test_steps_of_groups_pass_their_options_on() -> None:
    model = nn.ModuleList(
        vattn.Attention(2, 16, 0.25, prefix=str(index), per_layer_sliding_window=window)
        for index, window in enumerate((None, 16))
    )
    vattn.allocate_kv_cache(model, num_blocks=16, dtype=torch.float32, hybrid=True, max_seq_len=64)
    grouped = vattn.GroupedMetadataBuilder(4, 8, 64, layers=model)
    tables = [[[1]], [[2]]]
    assert grouped.build([1], [1], tables, num_reqs_padded=4).seq_lens.shape == (4,)
    with pytest.raises(UnknownOptionError, match="num_reqs_padded"):
        grouped.build([1], [1], tables, num_reqs_paded=4)


def test_a_layer_without_a_prefix_is_called_so() -> None:
    layer = vattn.Attention(2, 16, 0.25, cache_config=vattn.CacheConfig(block_size=8))
    step = builder().build([1], [1], [[0]])
    with pytest.raises(VattnError, match=r"layer \(no prefix given\) has no KV cache"):
        layer(*(step.seq_lens.new_zeros(2, 32).float() for _ in range(3)), metadata=step)


REFUSED_AT_ONCE = {
    "no callable": (lambda: vattn.compile(3), ConfigError, "compile with int"),
    "no layers": (lambda: vattn.compile_regions(3), ConfigError, "compile_regions of int"),
    "layers that are none": (lambda: vattn.compile_regions(["layer"]), ConfigError, "compile_regions of str"),
    "no path": (lambda: vattn.read_encoder_scales(None), ScaleError, "scale file None"),
    "mode and options": (
        lambda: vattn.compile(abs, mode="max-autotune", options=vattn.options()),
        ConfigError,
        r"options=vattn.options\(mode='max-autotune'\)",
    ),
    "an option of ours for Inductor": (
        lambda: vattn.compile(abs, options={"vattn.strikt": True}),
        UnknownOptionError,
        "backend=vattn.backend",
    ),
    "regions": (
        lambda: vattn.compile_regions([nn.Identity()], mode="default", options={}),
        ConfigError,
        "one of the two",
    ),
    "no mode": (lambda: vattn.compile(abs, mode="fast"), ConfigError, "mode='fast'. Allowed: default, "),
    "no option of Inductor": (
        lambda: vattn.compile(abs, options=vattn.options({"triton.nope": True})),
        UnknownOptionError,
        "option 'triton.nope'. Allowed: Inductor's",
    ),
    "shortest over longest": (lambda: vattn.PromptLookup(longest=2, shortest=9), ConfigError, "longest=2, shortest=9"),
    "no format": (lambda: vattn.register_kv_format(3), ConfigError, "a KV format of type int"),
    "no builder": (lambda: vattn.warmup(nn.Identity()), ArgumentsError, "without builder"),
    "a builder of None": (lambda: vattn.warmup(nn.Identity(), None), ConfigError, "builder of type NoneType"),
    "clips of no model": (lambda: vattn.observe_clipping(3).__enter__(), ConfigError, "observe_clipping of int"),
    "rates of no model": (lambda: vattn.clip_rates(3), ConfigError, "clip_rates of int"),
    "no format at all": (lambda: vattn.register_kv_format(), ArgumentsError, "without fmt"),
}


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE.keys())
def test_what_is_no_model_option_or_format_is_refused_at_once(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
