"""What kernels share: masks, codecs, softmax, epilogues, tile sizes."""
