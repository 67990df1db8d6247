"""The generator behind FastAPI (pip install fastapi uvicorn httpx): one thread owns it, handlers talk to it by queues.

uvicorn --app-dir examples 15_http_server:app
python examples/15_http_server.py "def add(a, b):"        (a streaming client in another terminal)
"""

import asyncio
import sys
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

import vattn
from vattn.cli.generate import load_model
from vattn.integrations.transformers import enable

app, jobs, generators = FastAPI(), SimpleQueue(), []


def serve() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(Path(__file__).parent / "demo_model", device, None)
    generators.append(generator := vattn.Generator(enable(model, memory="64MiB"), tokenizer, max_queue=64))
    outputs: dict[vattn.Request, Any] = {}
    while True:
        try:
            while True:
                prompt, sampling, put, old = jobs.get(block=not generator.busy)
                if old is not None:
                    generator.cancel(old)
                    outputs.pop(old, None)
                    continue
                try:
                    request = generator.add(prompt, vattn.Sampling(*sampling))
                    outputs[request] = put
                    put(request)
                except vattn.errors.VattnError as error:
                    put(error)
        except Empty:
            pass
        for part in generator.step():
            outputs[part.request](part.text)
            if part.request.done:
                outputs.pop(part.request)(None)


@app.post("/generate")
async def generate(prompt: str, max_new_tokens: int = 64, temperature: float = 0.0) -> StreamingResponse:
    """Stream the text of one prompt; who goes away cancels it."""
    loop, texts = asyncio.get_running_loop(), asyncio.Queue()
    sampling = max_new_tokens, temperature
    jobs.put((prompt, sampling, lambda item: loop.call_soon_threadsafe(texts.put_nowait, item), None))
    request = await texts.get()
    if isinstance(request, Exception):
        raise HTTPException(503 if isinstance(request, vattn.errors.QueueFullError) else 422, str(request))

    async def stream() -> Any:
        try:
            while (text := await texts.get()) is not None:
                yield text
        finally:
            jobs.put((None, None, None, request))

    return StreamingResponse(stream(), media_type="text/plain")


threading.Thread(target=serve, daemon=True).start()

if __name__ == "__main__":
    import httpx

    with httpx.stream("POST", "http://127.0.0.1:8000/generate", params={"prompt": sys.argv[1]}, timeout=60) as answer:
        for piece in answer.iter_text():
            print(piece, end="", flush=True)
