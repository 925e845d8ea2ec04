"""What a version of TensorRT-LLM does with an engine directory, which trtllm-build has written.

Before 1.0 such a directory is what it serves by default. From 1.0 on the backend for engines has to be asked for. In
mid-2026 that backend was removed.
"""


def needs_backend(version: str, has_backend: bool) -> bool:
    """Whether this version serves engines only when asked to. has_backend: its package `_tensorrt_engine` exists.

    ValueError if it serves none.
    """
    if int(version.split(".")[0]) < 1:
        return False
    if not has_backend:
        raise ValueError(
            f"TensorRT-LLM {version} serves no engine directories: that was removed in mid-2026. Use 1.1 or older "
            "(NVIDIA's images of 25.07 to 25.12), or serve the HuggingFace directory, see docs/llm.md"
        )
    return True
