"""The engine `cuda`: CosyVoice2's LLM, a Qwen2 network, by kernels and CUDA graphs of our own. It needs only torch.

Decisions:

- **A prompt's last token is computed by a decode step.** So there are two kinds of work: a prefill, which only writes
  keys and values of the prompt's other tokens, and a step, which computes one token of each row and samples the next.
  Both are the same network over a batch of tokens, each with a slot and a position.
- **What a step needs is on the device**: each request's last token, length, sampling, seen tokens and end. The host
  only says which slots are in the batch. It launches steps before it has read back the tokens of earlier ones; a row
  that has ended in the meantime does nothing. So the host's work hides behind the device's, and one read-back can
  serve several steps.
- **Pages for a request's longest answer are allocated before it starts.** No request is interrupted for lack of memory,
  and those that wait start in the order of their arrival.

`engine` is the loop in a thread. `scheduler` decides, and knows no tensors. `decoder` computes, on a GPU by one CUDA
graph for each size of a batch (`decode_graphs`). `operations` has the network's parts in plain torch, which run
everywhere, and `fused_operations` has kernels for them. On a CPU the same steps run eagerly, in float32.
"""
