"""Serve many requests on one paged cache: requests, the scheduler, sampling, and the loop that runs them."""

from vattn.generation.generator import Generator
from vattn.generation.launch import model_inputs
from vattn.generation.request import Request, Sampling
from vattn.generation.statistics import Progress, Statistics

__all__ = ["Generator", "Progress", "Request", "Sampling", "Statistics", "model_inputs"]
