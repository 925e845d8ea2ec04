"""The engine `cuda`: decoding of CosyVoice2's LLM, a Qwen2 network, by our own means. Needs torch alone.

Decisions:

- **A prompt's last token is computed as a decoding step.** So there are two kinds of work: prefill, which only writes
  keys and values of the prompt's other tokens, and a step, which computes one token of each row and draws the next.
  Both are the same network over a batch of tokens, each with a slot and a position.
- **What a step needs is on the device**: each request's last token, length, sampling, seen tokens and end. The host
  only says which slots are in the batch. It launches steps before it has seen the tokens of earlier ones; a row that
  has ended in the meantime does nothing. So the host's work hides behind the device's, and one look at the tokens can
  serve several steps.
- **Pages for a request's longest answer are reserved before it starts.** No request is interrupted for lack of memory,
  and those that wait start in the order of their arrival.

`scheduler` decides, and knows no tensors; `decoder` computes, on a GPU by one CUDA graph for each size of a batch;
`operations` are the network's parts in plain torch, which run everywhere, and `fused` has kernels for them. On a CPU
the same steps run eagerly, in float32.
"""
