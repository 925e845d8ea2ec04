"""A model.py that stands in for TensorRT-LLM's C++ backend, which needs a GPU: as strict with parameters and tensors.

It answers with the first tokens that the request's `embedding_bias` allows, one a response, and the end token.
"""

import json
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

TOKENS = 60
REQUIRED = ("gpt_model_type", "tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
BATCHING = ("inflight_fused_batching", "inflight_batching", "V1", "v1")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        for name in REQUIRED:
            if name not in parameters:
                raise RuntimeError(f"Cannot find parameter with name: {name}")
        if parameters["gpt_model_type"] not in BATCHING:
            raise RuntimeError("Invalid gpt_model_type")
        if not parameters["gpt_model_path"] or parameters["exclude_input_in_output"] not in ("True", "true", "1"):
            raise RuntimeError("the stand-in knows no other mode")
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        # As a model of ours has, so that a server that hangs while it loads is started again.
        Path(os.environ["TTS_METRICS_DIR"], f"{args['model_instance_name']}.metrics").touch()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                for tokens in self._answer(request):
                    ids = np.array([[tokens]], np.int32)
                    outputs = [
                        pb_utils.Tensor("output_ids", ids),
                        pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], np.int32)),
                    ]
                    sender.send(pb_utils.InferenceResponse(outputs))
            except ValueError as error:
                sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request):
        def read(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                raise ValueError(f"{name} is missing")
            return tensor.as_numpy()

        if read("streaming").item() and not self._decoupled:
            raise ValueError("Streaming is only supported if model is deployed using decoupled mode.")
        if request.parameters() not in ("", "{}"):
            raise ValueError(f"the backend reads no request parameters, got {request.parameters()}")
        if read("input_ids").shape[1] != read("input_lengths").item():
            raise ValueError("input_lengths is not the length of input_ids")
        allowed = np.flatnonzero(np.isfinite(read("embedding_bias").reshape(-1)))
        for token in [*allowed[: min(TOKENS, read("request_output_len").item())], read("end_id").item()]:
            yield [int(token)]
