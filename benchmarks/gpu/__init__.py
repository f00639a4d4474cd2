"""How fast, and with how much memory, on a GPU. Each needs torch with CUDA, and is run by itself."""
