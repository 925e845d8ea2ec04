#!/usr/bin/env bash
# The cosyvoice3 stack in stages:  bash scripts/run_cosyvoice3.sh START STOP
#
#   -1  check the machine                    3  serve: an LLM server and Triton; stop with the script, as last stage on
#    0  download the checkpoints                Ctrl-C
#    1  build and try the LLM's engine       4  gRPC benchmark
#    2  render the model repository          5  offline benchmark, LLM and token2wav in turn
#
#   bash scripts/run_cosyvoice3.sh 0 3            from nothing to a server, in the image of Dockerfile.server
#   bash scripts/run_cosyvoice3.sh 4 4            benchmark running servers
#   LOCAL=1 bash scripts/run_cosyvoice3.sh -1 5   everything on a CPU, with random weights; the LLM inside Triton
#
# Settings, from the environment: WORK MODELS REPOSITORY OUT LOGS PYTHON, HTTP_PORT GRPC_PORT METRICS_PORT HEALTH_PORT
# LLM_PORT, HUB (huggingface or modelscope), MAX_BATCH_SIZE NUM_TASKS, DATA and OFFLINE_DATA (options that choose the
# benchmarks' texts and voices).

# shellcheck source-path=SCRIPTDIR source=stages.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/stages.sh"

LOCAL=${LOCAL:-0}
HUB=${HUB:-huggingface}
HTTP_PORT=${HTTP_PORT:-18000} # the LLM server uses 8000
GRPC_PORT=${GRPC_PORT:-18001}
METRICS_PORT=${METRICS_PORT:-18002}
HEALTH_PORT=${HEALTH_PORT:-18003}
LLM_PORT=${LLM_PORT:-8000}
MAX_BATCH_SIZE=${MAX_BATCH_SIZE:-64}
NUM_TASKS=${NUM_TASKS:-4}

if ((LOCAL)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores, and the demo's networks are small
    MODELS=${MODELS:-$WORK/models/random}
    REPOSITORY=${REPOSITORY:-$WORK/build/cosyvoice3}
    DATA=${DATA:---manifest-path $SAMPLES/manifest.jsonl}
    OFFLINE_DATA=${OFFLINE_DATA:---manifest-path $SAMPLES/manifest.jsonl}
    CHECKPOINTS=(cosyvoice_triton.demo_checkpoint.make "$MODELS" --weights random)
    ENGINE=(--kind onnxruntime_genai)
    ENGINE_DIR=$MODELS/cosyvoice3_llm_genai
    ENGINE_PYTHON=$PYTHON
    RENDER=(--device cpu)
    LLM_COMMAND=()
    LLM_OPTIONS=(--backend onnxruntime_genai --engine-dir "$ENGINE_DIR" --batch-size 4)
else
    MODELS=${MODELS:-$WORK/models/official}
    REPOSITORY=${REPOSITORY:-$WORK/build/cosyvoice3}
    DATA=${DATA:---huggingface-dataset yuekai/seed_tts_cosy2 --split-name wenetspeech4tts}
    OFFLINE_DATA=${OFFLINE_DATA:---split-name wenetspeech4tts}
    CHECKPOINTS=(cosyvoice_triton.cli.prepare download --stack cosyvoice3 --hub "$HUB" "$MODELS")
    ENGINE=(--kind tensorrt_llm --max-batch-size "$MAX_BATCH_SIZE")
    LLM_MODEL=cosyvoice3_trt_engines_bfloat16
    ENGINE_DIR=$MODELS/$LLM_MODEL
    ENGINE_PYTHON=${TRTLLM_PYTHON:-$PYTHON} # in the image another Python has TensorRT-LLM
    RENDER=(--device gpu --llm-transport openai --llm-urls "http://127.0.0.1:$LLM_PORT/v1" --llm-model "$LLM_MODEL")
    LLM_COMMAND=("$PYTHON" -m cosyvoice_triton.prepare.trtllm_serve "$ENGINE_DIR" --tokenizer "$MODELS/cosyvoice3_llm"
        --host 127.0.0.1 --port "$LLM_PORT" --max_batch_size "$MAX_BATCH_SIZE" --kv_cache_free_gpu_memory_fraction 0.4)
    LLM_OPTIONS=(--backend trtllm-serve --openai-model-name "$LLM_MODEL" --batch-size 16
        --openai-api-base "http://127.0.0.1:$LLM_PORT/v1")
fi
OUT=${OUT:-$WORK/out/cosyvoice3}
read -ra DATA <<<"$DATA"
read -ra OFFLINE_DATA <<<"$OFFLINE_DATA"

read_stages -1 5 "$@"

if stage -1 "check the machine"; then
    "$PYTHON" scripts/check_machine.py
fi

if stage 0 "download the checkpoints"; then
    "$PYTHON" -m "${CHECKPOINTS[@]}"
fi

if stage 1 "build and try the LLM's engine"; then
    "$PYTHON" -m cosyvoice_triton.cli.prepare engine "$MODELS" --stack cosyvoice3 "${ENGINE[@]}"
    "$ENGINE_PYTHON" -m cosyvoice_triton.cli.test_llm --tokenizer_dir "$MODELS/cosyvoice3_llm" --engine_dir "$ENGINE_DIR" \
        --max_tokens 50
fi

if stage 2 "render the model repository"; then
    "$PYTHON" -m cosyvoice_triton.cli.render "$MODELS" "$REPOSITORY" --stack cosyvoice3 "${RENDER[@]}"
fi

if stage 3 "serve: an LLM server and Triton"; then
    start_llm
    start triton "$PYTHON" -m cosyvoice_triton.cli.serve "$REPOSITORY" --log-file "$LOGS/tritonserver.log" --http-port "$HTTP_PORT" \
        --grpc-port "$GRPC_PORT" --metrics-port "$METRICS_PORT" --health-port "$HEALTH_PORT"
    await triton "http://127.0.0.1:$HEALTH_PORT/ready"
    hold
fi

if stage 4 "gRPC benchmark, $NUM_TASKS tasks"; then
    "$PYTHON" -m cosyvoice_triton.cli.client_grpc --server-addr 127.0.0.1 --server-port "$GRPC_PORT" --model-name cosyvoice3 \
        --num-tasks "$NUM_TASKS" --mode streaming "${DATA[@]}" --log-dir "$OUT/grpc_streaming_${NUM_TASKS}_tasks"
fi

if stage 5 "offline benchmark, LLM and token2wav in turn"; then
    "$PYTHON" -m cosyvoice_triton.cli.offline_inference "${LLM_OPTIONS[@]}" --llm-model-name-or-path "$MODELS/cosyvoice3_llm" \
        --token2wav-path "$MODELS/Fun-CosyVoice3-0.5B-2512" --token2wav-batch-size 4 "${OFFLINE_DATA[@]}" \
        --output-dir "$OUT/offline"
fi
