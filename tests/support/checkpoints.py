"""The folders of the built-in stacks' files, below the directory with all checkpoints."""

from cosyvoice_triton import stacks

LLM_DIR = stacks.COSYVOICE2_LLM.directory
DIT_DIR, UNET_DIR = str(stacks.DIT.checkpoint), str(stacks.UNET.checkpoint)
