#!/usr/bin/env bash
# The cosyvoice3 stack in stages:  bash scripts/run_cosyvoice3.sh START STOP
#
#   -1  check the machine                    3  serve; stops with the script, as last stage on Ctrl-C
#    0  download the checkpoints             4  gRPC benchmark
#    1  try the LLM                          5  offline benchmark, LLM and token2wav in turn
#    2  render the model repository
#
# LLM=cuda, the default: our engine in Triton. LLM=trtllm-serve, upstream's way, in the image `trtllm`: stage 1 builds
# TensorRT-LLM's engine, stage 3 also starts its server.
#
#   bash scripts/run_cosyvoice3.sh 0 3            from nothing to a server, in the image `gpu`
#   bash scripts/run_cosyvoice3.sh 4 4            benchmark running servers
#   LOCAL=1 bash scripts/run_cosyvoice3.sh -1 5   everything on a CPU, with the demo voice
#
# Settings, from the environment: WORK MODELS REPOSITORY OUT LOGS PYTHON, HTTP_PORT GRPC_PORT METRICS_PORT HEALTH_PORT
# LLM_PORT, LLM, HUB (huggingface or modelscope), MAX_BATCH_SIZE NUM_TASKS, DATA and OFFLINE_DATA (options that choose the
# benchmarks' texts and voices).

# shellcheck source-path=SCRIPTDIR source=stages.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/stages.sh"

LOCAL=${LOCAL:-0}
HUB=${HUB:-huggingface}
HTTP_PORT=${HTTP_PORT:-18000} # an LLM server uses 8000
GRPC_PORT=${GRPC_PORT:-18001}
METRICS_PORT=${METRICS_PORT:-18002}
HEALTH_PORT=${HEALTH_PORT:-18003}
LLM_PORT=${LLM_PORT:-8000}
MAX_BATCH_SIZE=${MAX_BATCH_SIZE:-64}
NUM_TASKS=${NUM_TASKS:-4}

if ((LOCAL)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores, and the demo's networks are small
    MODELS=${MODELS:-$WORK/models/demo}
    REPOSITORY=${REPOSITORY:-$WORK/build/cosyvoice3}
    DATA=${DATA:---manifest-path $SAMPLES/manifest.jsonl}
    OFFLINE_DATA=${OFFLINE_DATA:---manifest-path $SAMPLES/manifest.jsonl}
    CHECKPOINTS=(demo)
    ENGINE=(--kind onnxruntime_genai)
    ENGINE_PYTHON=$PYTHON
    LLM_TEST=(--engine_dir "$MODELS/cosyvoice3_llm_genai")
    RENDER=(--device cpu)
    LLM_COMMAND=()
    LLM_OPTIONS=(--backend onnxruntime_genai --engine-dir "$MODELS/cosyvoice3_llm_genai" --batch-size 4)
else
    MODELS=${MODELS:-$WORK/models/official}
    REPOSITORY=${REPOSITORY:-$WORK/build/cosyvoice3}
    DATA=${DATA:---huggingface-dataset yuekai/seed_tts_cosy2 --split-name wenetspeech4tts}
    OFFLINE_DATA=${OFFLINE_DATA:---split-name wenetspeech4tts}
    CHECKPOINTS=(download --stack cosyvoice3 --hub "$HUB")
    use_llm cosyvoice3_llm cosyvoice3_trt_engines_bfloat16 trtllm-serve
    RENDER=(--device gpu "${LLM_RENDER[@]}")
fi
OUT=${OUT:-$WORK/out/cosyvoice3}
read -ra DATA <<<"$DATA"
read -ra OFFLINE_DATA <<<"$OFFLINE_DATA"

read_stages -1 5 "$@"

if stage -1 "check the machine"; then
    "$PYTHON" scripts/doctor.py "$MODELS" --stack cosyvoice3 "${RENDER[@]}" --disk 6 \
        --ports "$HTTP_PORT" "$GRPC_PORT" "$METRICS_PORT" "$HEALTH_PORT"
fi

if stage 0 "download the checkpoints"; then
    "$PYTHON" -m cosyvoice_triton prepare "${CHECKPOINTS[@]}" "$MODELS"
fi

if stage 1 "try the LLM"; then
    [[ -z ${ENGINE[*]} ]] || "$PYTHON" -m cosyvoice_triton prepare engine "$MODELS" --stack cosyvoice3 "${ENGINE[@]}"
    "$ENGINE_PYTHON" -m cosyvoice_triton test-llm --tokenizer_dir "$MODELS/cosyvoice3_llm" "${LLM_TEST[@]}" \
        --max_tokens 50
fi

if stage 2 "render the model repository"; then
    "$PYTHON" -m cosyvoice_triton render "$MODELS" "$REPOSITORY" --stack cosyvoice3 "${RENDER[@]}"
fi

if stage 3 "serve"; then
    start_llm
    start triton "$PYTHON" -m cosyvoice_triton serve "$REPOSITORY" --log-file "$LOGS/tritonserver.log" --http-port "$HTTP_PORT" \
        --grpc-port "$GRPC_PORT" --metrics-port "$METRICS_PORT" --health-port "$HEALTH_PORT"
    await triton "http://127.0.0.1:$HEALTH_PORT/ready"
    hold
fi

if stage 4 "gRPC benchmark, $NUM_TASKS tasks"; then
    "$PYTHON" -m cosyvoice_triton client-grpc --server-addr 127.0.0.1 --server-port "$GRPC_PORT" --model-name cosyvoice3 \
        --num-tasks "$NUM_TASKS" --mode streaming "${DATA[@]}" --log-dir "$OUT/grpc_streaming_${NUM_TASKS}_tasks"
fi

if stage 5 "offline benchmark, LLM and token2wav in turn"; then
    "$PYTHON" -m cosyvoice_triton offline "${LLM_OPTIONS[@]}" --llm-model-name-or-path "$MODELS/cosyvoice3_llm" \
        --token2wav-path "$MODELS/Fun-CosyVoice3-0.5B-2512" --token2wav-batch-size 4 "${OFFLINE_DATA[@]}" \
        --output-dir "$OUT/offline"
fi
