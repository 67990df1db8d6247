"""Run a small model in SGLang's own model runner on a CPU, with vattn, and compare with transformers in fp32.

`python -m tests.integrations.sglang_model_run {llama,gemma2} PAGE_SIZE` prints JSON: the runner's backend and pool, how
many greedy tokens are equal, of how many, and the largest difference of a logit.

Real: SGLang's loader, model, model runner, pools, allocator, batches and sampler, driven as its own `one_batch`
benchmark drives them. One thing is changed: rotary embedding would call a kernel of another package on a machine
without a GPU, so it gets the CPU's flag and computes with its own native code. No server, scheduler or CUDA graph runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from array import array
from typing import Any

import torch

from tests.integrations import sglang_engine

LENGTHS, CUT, NEW = (40, 17, 90, 33), 12, 16


def make_model(kind: str) -> Any:
    """Return a model of random weights; its window, if it has one, is shorter than the prompts."""
    import transformers

    sizes = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "dtype": torch.float32,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    config = transformers.Gemma2Config(
        **sizes,
        hidden_act="gelu_pytorch_tanh",
        sliding_window=24,
        attn_logit_softcapping=3.0,
        query_pre_attn_scalar=16,
        final_logit_softcapping=None,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config).eval()


def load(path: str, page_size: int) -> Any:
    """Return SGLang's runner of the model at a path."""
    import sglang.benchmark.one_batch as one_batch
    import sglang.srt.layers.rotary_embedding.base as rotary

    rotary._is_cpu = True
    one_batch.get_tokenizer = lambda *args, **kwargs: None  # the model has no words
    args = sglang_engine.ServerArgs(
        model_path=path, device="cpu", dtype="float32", attention_backend="vattn", page_size=page_size,
        skip_tokenizer_init=True, max_total_tokens=1024, max_running_requests=4, sampling_backend="pytorch",
        grammar_backend="none", disable_cuda_graph=True, mem_fraction_static=0.5,
    )  # fmt: skip
    ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    return one_batch.load_model(args, one_batch.PortArgs.init_new(args), 0, 0)[0]


def generate(runner: Any, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return greedy tokens and their logits: a first chunk of each prompt, the rest of it, then decodes."""
    import sglang.benchmark.one_batch as one_batch

    requests = one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, [prompt[:CUT] for prompt in prompts])
    for request in requests:
        request.sampling_params.normalize(None)
    runner.extend(requests)
    for request, prompt in zip(requests, prompts, strict=True):
        request.full_untruncated_fill_ids = request.origin_input_ids = array("q", prompt)
        request.prefix_len, request.extend_end = CUT, len(prompt)
    tokens, logits, batch = runner.extend(requests)
    steps = [(tokens, logits.clone())]
    for _ in range(NEW - 1):
        tokens, logits = runner.decode(tokens, batch)
        steps.append((tokens, logits.clone()))
    return torch.stack([t for t, _ in steps], 1), torch.stack([t for _, t in steps], 1)


def main() -> None:
    from vattn.integrations import sglang

    kind, page_size = sys.argv[1], int(sys.argv[2])
    sglang.register()
    model, rng = make_model(kind), torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 256, (length,), generator=rng).tolist() for length in LENGTHS]
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        runner = load(path, page_size)
    tokens, logits = generate(runner, prompts)
    equal, worst = 0, 0.0
    for prompt, own, scores in zip(prompts, tokens.tolist(), logits, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1]
        equal += sum(a == b for a, b in zip(expected.argmax(-1).tolist(), own, strict=True))
        worst = max(worst, float((expected - scores).abs().max()))
    own = runner.torch_runner
    found = {"backend": type(own.attn_backend).__name__, "pool": type(own.token_to_kv_pool).__name__}
    print(json.dumps({**found, "equal": equal, "of": tokens.numel(), "worst": worst}))


if __name__ == "__main__":
    main()
