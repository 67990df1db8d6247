"""Train the demo model: a small byte-level Llama that writes Python.

The training text is the Python standard library's own source. A few modules, named in ``HELD_OUT``, are kept out
together with their tests, and are written to ``heldout.txt`` to measure the model on text that it has not seen.
The result is an ordinary checkpoint for ``LlamaForCausalLM.from_pretrained``; a token is a byte, so the tokenizer is
``list(text.encode())``, and byte 0 separates files.

    python examples/train_demo_model.py --out my_model
    python examples/train_demo_model.py --device cpu --steps 5 --batch-size 2 --context 128 --out tiny
"""

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

HELD_OUT = ("graphlib.py", "reprlib.py", "shelve.py")
HELD_OUT_TESTS = tuple(f"test/test_{name}" for name in HELD_OUT)
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}  # installed code, tables
MAX_FILE_BYTES = 300_000


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention that takes no mask: under torch.compile, transformers' "sdpa" would build one, which is slow."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", causal_attention)


def model_config(attention: str) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        hidden_act="silu",
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )


def read_corpus(root: Path) -> tuple[torch.Tensor, bytes]:
    """All training files as one uint8 tensor, byte 0 before each file, and the held-out modules' text."""
    files = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.as_posix() in HELD_OUT + HELD_OUT_TESTS or SKIPPED_FOLDERS.intersection(inside.parts):
            continue
        data = path.read_bytes()
        if len(data) <= MAX_FILE_BYTES and b"\0" not in data:
            files.append(data)
    if not files:
        sys.exit(f"no Python source under {root}")
    corpus = b"\0" + b"\0".join(files)
    heldout = b"".join((root / name).read_bytes() for name in HELD_OUT)
    return torch.frombuffer(bytearray(corpus), dtype=torch.uint8), heldout


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, text: bytes, context: int = 1024) -> float:
    """Mean bits per byte of ``text``, byte 0 before it, cut into blocks of ``context`` that do not see one another."""
    tokens = torch.tensor(list(b"\0" + text), device=model.device)
    nats = 0.0
    for start in range(0, len(text), context):
        block = tokens[start : start + context + 1]
        logits = model(input_ids=block[None, :-1], use_cache=False).logits[0]
        nats += F.cross_entropy(logits.float(), block[1:], reduction="sum").item()
    return nats / math.log(2) / len(text)


def save(model: LlamaForCausalLM, heldout: bytes, out: Path) -> float:
    """Write the bf16 checkpoint; returns the bits per byte of the rounded weights, computed in fp32."""
    rounded = LlamaForCausalLM(model_config("sdpa")).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "heldout.txt").write_bytes(heldout)
    return bits_per_byte(rounded.float().to(model.device).eval(), heldout)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    corpus, heldout = read_corpus(args.data)
    corpus = corpus.to(device)
    model = LlamaForCausalLM(model_config("causal")).to(device).train()
    print(f"{model.num_parameters():,} parameters, {len(corpus):,} bytes to train on, {len(heldout):,} held out")
    for layer in model.model.layers:
        for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
            branch.register_forward_hook(lambda module, inputs, output: F.dropout(output, args.dropout))

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    crops = torch.Generator(device).manual_seed(args.seed)
    offsets = torch.arange(args.context + 1, device=device)

    @torch.compile(disable=args.no_compile)
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def train_step(lr: float) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = torch.randint(len(corpus) - args.context, (args.batch_size, 1), device=device, generator=crops)
        loss = loss_of(corpus[starts + offsets].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def report(step: int) -> None:
        seconds, bits = time.monotonic() - began, torch.stack(recent).mean().item() / math.log(2)
        tokens = step * args.batch_size * args.context
        tqdm.write(f"step {step} tokens {tokens:,} seconds {seconds:.0f} lr {lr:.2e} train bits/byte {bits:.4f}")
        recent.clear()

    train_step(0.0)  # compiles, outside the clock; a learning rate of 0 leaves the weights as they are
    began = last_report = last_save = time.monotonic()
    recent: list[torch.Tensor] = []
    step, done = 0, 0.0
    with tqdm(total=100, unit="%", disable=None, bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}") as bar:
        while done < 1.0:
            warmup, cosine = min(1.0, (step + 1) / args.warmup), 0.5 + 0.5 * math.cos(math.pi * done)
            lr = args.lr * warmup * (args.final_lr + (1.0 - args.final_lr) * cosine)
            recent.append(train_step(lr))
            step += 1
            if step % 20 == 0:
                recent[-1].item()  # waits for the device, so that the clock below is right
            now = time.monotonic()
            done = max(step / args.steps, (now - began) / 60 / args.minutes)
            bar.update(min(100.0, 100 * done) - bar.n)
            if now - last_report > 10:
                report(step)
                last_report = now
            if now - last_save > args.save_every and done < 1.0:
                tqdm.write(f"checkpoint at step {step}: held out bits/byte {save(model, heldout, args.out):.4f}")
                last_save = now
    if recent:
        report(step)
    print(f"saved {args.out} at step {step}: held out bits/byte {save(model, heldout, args.out):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of .py files")
    parser.add_argument("--out", type=Path, default=Path("demo_model"), help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long, compilation not counted")
    parser.add_argument("--steps", type=int, default=3780, help="stop after this many; --minutes may end it sooner")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--final-lr", type=float, default=0.05, help="last learning rate, as a fraction of the peak")
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.5, help="of matrices only")
    parser.add_argument("--dropout", type=float, default=0.1, help="of what each block adds to the residual stream")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
