"""What the tests of the generator share: prompts, the tokens of one-by-one generation, a model with faults."""

from __future__ import annotations

from array import array
from typing import Any

import torch

import vattn
from vattn.generation.cache_blocks import longest_that_fits

BLOCK = 16
GREEDY = vattn.Sampling(max_new_tokens=12, stop_token_ids=())
PROMPTS = [list(range(3, 44)), [7, 5, 90], list(range(50, 70)), [9], list(range(3, 40)), [11, 12] * 9]


def one_by_one(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what a model of transformers generates greedily without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def chosen(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return what a model of transformers chooses greedily after a prompt and after each token of an output."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + output[:-1]])).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()


def make_generator(packed: Any, **options: Any) -> vattn.Generator:
    """Return a small generator for requests of up to 128 tokens, or what the cache holds."""
    most = min(128, longest_that_fits(packed.kv_cache, options.get("token_budget", 64)))
    return vattn.Generator(packed, **{"max_num_reqs": 4, "token_budget": 64, "max_seq_len": most, **options})


def check_empty(generator: vattn.Generator) -> None:
    """Assert that no block and no row of the tables is lost."""
    blocks = generator.scheduler.blocks
    generator.scheduler.pool.check()
    assert blocks.pool.num_used == 0 and not generator.busy
    assert blocks.num_free_rows == generator.scheduler.max_num_reqs


def run_to_end(generator: vattn.Generator) -> None:
    """Step until no request is left; nothing may be lost by then."""
    while generator.busy:
        generator.step()
    check_empty(generator)


def run_with_cancels(generator: vattn.Generator, expected: list[list[int]], turns: int) -> list[Any]:
    """Run `PROMPTS` some times, each time beside a request that is cancelled; return the last requests.

    Args:
        expected: the tokens of each prompt.
    """
    sampling = vattn.Sampling(max_new_tokens=len(expected[0]), stop_token_ids=())
    for turn in range(turns):
        cancelled = generator.add(PROMPTS[turn] + [4], sampling)
        requests = [generator.add(prompt, sampling) for prompt in PROMPTS]
        for _ in range(4 + turn):
            generator.step()
        generator.cancel(cancelled)
        while generator.busy:
            generator.step()
        assert [request.output for request in requests] == expected
    return requests


class Characters:
    """A tokenizer of one letter per token."""

    def encode(self, text: str) -> list[int]:
        """Return a number for each character."""
        return [ord(c) - 32 for c in text]

    def decode(self, ids: list[int]) -> str:
        """Return a character for each number."""
        return "".join(chr(i + 32) for i in ids)


class Faulty(torch.nn.Module):
    """A model that raises in one step, or gives NaN to requests whose last token is 90."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.packed, self.kv_cache, self.bad = packed, packed.kv_cache, 90
        # An attribute that counts down would be a change of the model in each step, after which no prefix is found.
        self._left = array("q", [0])

    @property
    def raise_in(self) -> int:
        """Calls until one raises; 0 and below for none."""
        return self._left[0]

    @raise_in.setter
    def raise_in(self, calls: int) -> None:
        self._left[0] = calls

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the model's logits, or a fault."""
        self.raise_in -= 1
        if self.raise_in == 0:
            raise ZeroDivisionError("the model failed")
        out = self.packed(ids, positions, rows)
        column = torch.arange(out.shape[1], device=out.device) == 7
        return out.masked_fill((ids[rows] == self.bad)[:, None] & column, torch.nan)


CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template: str | None = CHAT) -> Any:
    """Return a tokenizer of transformers: bytes, some merges, a begin and an end token, and a chat template."""
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "¯"), ("i", "n")]
    vocab = {token: i for i, token in enumerate(special + letters + [a + b for a, b in merges])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(special)
    inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=chat_template
    )


WORDS = 272
"""A vocabulary larger than that of `make_tokenizer`, as models pad theirs."""
