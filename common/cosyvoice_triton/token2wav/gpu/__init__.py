"""What the networks need on a GPU: CUDA graphs and their sizes, memory, fixed noise, number formats."""
