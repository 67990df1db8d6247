"""Serve many requests on one paged cache: requests, the scheduler, sampling, and the loop that runs them."""

from vattn.generation.async_generator import AsyncGenerator
from vattn.generation.chat import Chat
from vattn.generation.draft_model import DraftModel
from vattn.generation.draft_source import DraftSource
from vattn.generation.eagle_draft import EagleDraft
from vattn.generation.embedder import Embedder
from vattn.generation.generator import Generator
from vattn.generation.grammar import Grammar
from vattn.generation.model_steps import model_inputs
from vattn.generation.mtp_draft import MtpDraft
from vattn.generation.prompt_embeddings import PromptEmbeddings
from vattn.generation.prompt_lookup import PromptLookup
from vattn.generation.request import Progress, Request
from vattn.generation.sampling import Sampling
from vattn.generation.statistics import Statistics
from vattn.generation.submission import Submission

__all__ = [
    "AsyncGenerator",
    "Chat",
    "DraftModel",
    "DraftSource",
    "EagleDraft",
    "Embedder",
    "Generator",
    "Grammar",
    "MtpDraft",
    "Progress",
    "PromptEmbeddings",
    "PromptLookup",
    "Request",
    "Sampling",
    "Statistics",
    "Submission",
    "model_inputs",
]
