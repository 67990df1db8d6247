"""FlashInfer's wrappers and its XQA kernels."""
