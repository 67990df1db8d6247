"""Attention layers as published models have them: what `bench attention --random` draws from.

Each line is one kind of layer: name, query heads, KV heads, head size; then its window, soft cap or sinks. Models whose
layers differ have a line for each kind. Facts of the models' own configuration files, whole models on one GPU.
"""

from __future__ import annotations

from vattn.cli.bench.shapes import LayerShape

_TABLE = """
arctic                    56  8 128
baichuan2-7b              32 32 128
bitnet-2b                 20  5 128
codegen-16b               24 24 256
command-r                 64 64 128
command-r-plus            96  8 128
command-r7b               32  8 128 window=4096
danube-1.8b               32  8  80 window=4096
danube3-4b                32  8 120
dolly-v2-3b               32 32  80
exaone-3.5-2.4b           32  8  80
exaone-4-32b              40  8 128 window=4096
ernie-4.5-21b             20  4 128
falcon-7b                 71  1  64
falcon-40b               128  8  64
falcon-180b              232  8  64
falcon3-7b                12  4 256
gemma-2b                   8  1 256
gemma-7b                  16 16 256
gemma2-2b                  8  4 256 soft_cap=50
gemma2-9b                 16  8 256 soft_cap=50
gemma2-9b-window          16  8 256 window=4096 soft_cap=50
gemma2-27b                32 16 128 soft_cap=50
gemma2-27b-window         32 16 128 window=4096 soft_cap=50
gemma3-1b-window           4  1 256 window=512
gemma3-4b                  8  4 256
gemma3-4b-window           8  4 256 window=1024
gemma3-12b                16  8 256
gemma3-12b-window         16  8 256 window=1024
gemma3-27b                32 16 128
gemma3-27b-window         32 16 128 window=1024
glm-4-9b                  32  2 128
glm-4.5                   96  8 128
gpt2                      12 12  64
gpt2-xl                   25 25  64
gpt-j-6b                  16 16 256
gpt-neox-20b              64 64  96
gpt-oss-20b               64  8  64 sinks
gpt-oss-20b-window        64  8  64 window=128 sinks
granite-3-2b              32  8  64
granite-34b-code          48  1 128
grok-1                    48  8 128 soft_cap=30
hunyuan-large             80  8 128
internlm2-20b             48  8 128
llama2-13b                40 40 128
llama3-8b                 32  8 128
llama3-70b                64  8 128
llama3-405b              128  8 128
llama3.2-1b               32  8  64
llama3.2-3b               24  8 128
llama4-scout              40  8 128
minicpm-2b                36 36  64
mistral-7b                32  8 128 window=4096
mistral-large             96  8 128
nemotron-4-15b            48  8 128
nemotron-4-340b           96  8 192
olmo-1b                   16 16 128
openelm-3b-first          12  3 128
openelm-3b-last           24  6 128
opt-2.7b                  32 32  80
opt-30b                   56 56 128
persimmon-8b              64 64  64
phi-2                     32 32  80
phi-3-mini                32 32  96 window=2047
phi-4                     40 10 128
pythia-1b                  8  8 256
qwen2-0.5b                14  2  64
qwen2.5-1.5b              12  2 128
qwen2.5-3b                16  2 128
qwen2.5-7b                28  4 128
qwen2.5-72b               64  8 128
qwen3-0.6b                16  8 128
qwen3-30b-a3b             32  4 128
qwen3-235b-a22b           64  4 128
qwen3-next-80b            16  2 256
recurrentgemma-2b         10  1 256 window=2048
skywork-13b               36 36 128
smollm-135m                9  3  64
smollm-360m               15  5  64
smollm3-3b                16  4 128
stablelm-2-12b            32  8 160
stablelm-3b               32 32  80
starcoder-15b             48  1 128
starcoder2-3b             24  2 128 window=4096
starcoder2-7b             36  4 128 window=4096
starcoder2-15b            48  4 128 window=4096
tinyllama-1.1b            32  4  64
yi-6b                     32  4 128
yi-34b                    56  8 128
zamba2-7b                 32 32 224
"""


def _layer(line: str) -> LayerShape:
    name, heads, kv_heads, head_size, *options = line.split()
    given = dict(option.partition("=")[::2] for option in options)
    return LayerShape(
        name,
        int(heads),
        int(kv_heads),
        int(head_size),
        window=int(given["window"]) if "window" in given else None,
        soft_cap=float(given["soft_cap"]) if "soft_cap" in given else None,
        sinks="sinks" in given,
    )


PUBLISHED: tuple[LayerShape, ...] = tuple(_layer(line) for line in _TABLE.strip().splitlines())
