#!/usr/bin/env bash
# The unet stack in stages:  bash scripts/run.sh START STOP [streaming|offline]
#
#   -1  check the machine              3  serve; stops with the script, as last stage on Ctrl-C
#    0  download the checkpoints       4  one request over HTTP (offline only: it uses infer, one answer)
#    1  try the LLM                    5  gRPC benchmark
#    2  render the model repository    6  offline benchmark, without Triton
#    7  build token2wav's TensorRT plans; ENABLE_TRT=1 uses them in stages 2 to 6
#
# LLM=cuda, the default: our engine in Triton. LLM=trtllm-backend, upstream's way, in the image `trtllm`: stage 1 builds
# TensorRT-LLM's engine, Triton's C++ backend serves it, and stage 6 asks its server.
#
#   bash scripts/run.sh 0 3                    from nothing to a server, inside the image `gpu`
#   bash scripts/run.sh 5 5                    benchmark a running server
#   LOCAL=1 bash scripts/run.sh -1 6 offline   everything on a CPU, with the demo voice
#
# Settings, from the environment: WORK MODELS REPOSITORY OUT LOGS PYTHON, HTTP_PORT GRPC_PORT METRICS_PORT HEALTH_PORT
# LLM_PORT, LLM, HUB (huggingface or modelscope), USE_SPK2INFO_CACHE (1: stage 0 also downloads upstream's spk2info.pt, and
# stage 5 sends texts alone, which its speaker 001 speaks), ENABLE_TRT MAX_BATCH_SIZE NUM_TASKS, DATA and OFFLINE_DATA
# (options that choose the benchmarks' texts and voices).

# shellcheck source-path=SCRIPTDIR source=stages.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/stages.sh"

LOCAL=${LOCAL:-0}
ENABLE_TRT=${ENABLE_TRT:-0}
HUB=${HUB:-huggingface}
USE_SPK2INFO_CACHE=${USE_SPK2INFO_CACHE:-0}
MODE=${3:-streaming}
HTTP_PORT=${HTTP_PORT:-8000}
GRPC_PORT=${GRPC_PORT:-8001}
METRICS_PORT=${METRICS_PORT:-8002}
HEALTH_PORT=${HEALTH_PORT:-8003}
LLM_PORT=${LLM_PORT:-18000} # of stage 6
MAX_BATCH_SIZE=${MAX_BATCH_SIZE:-16}
NUM_TASKS=${NUM_TASKS:-2}
VOICE=(--reference-audio "$SAMPLES/reference_en.wav" --reference-text
    "Your call is now first in line and will be answered by the next available representative.")

SPK2INFO=() CACHED=()
if ((USE_SPK2INFO_CACHE)); then
    SPK2INFO=(--spk2info)
    CACHED=(--use-spk2info-cache True)
fi

if ((LOCAL)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores, and the demo's networks are small
    MODELS=${MODELS:-$WORK/models/demo}
    REPOSITORY=${REPOSITORY:-$WORK/build/unet}
    DATA=${DATA:---manifest-path $SAMPLES/manifest.jsonl}
    OFFLINE_DATA=${OFFLINE_DATA:---manifest-path $SAMPLES/manifest.jsonl}
    CHECKPOINTS=(demo)
    ENGINE=(--kind onnxruntime_genai)
    ENGINE_PYTHON=$PYTHON
    LLM_TEST=(--engine_dir "$MODELS/cosyvoice2_llm_genai")
    RENDER=(--device cpu)
    LLM_COMMAND=()
    LLM_OPTIONS=(--backend onnxruntime_genai --engine-dir "$MODELS/cosyvoice2_llm_genai" --batch-size 4)
    PLANS=(--capability 8.9) # to try it: they do not run on a CPU
else
    MODELS=${MODELS:-$WORK/models/official}
    REPOSITORY=${REPOSITORY:-$WORK/model_repo_cosyvoice2}
    DATA=${DATA:---huggingface-dataset yuekai/seed_tts --split-name wenetspeech4tts}
    OFFLINE_DATA=${OFFLINE_DATA:---split-name wenetspeech4tts}
    CHECKPOINTS=(download --stack unet --hub "$HUB" "${SPK2INFO[@]}")
    use_llm cosyvoice2_llm trt_engines_bfloat16 trtllm-backend
    RENDER=(--device gpu "${LLM_RENDER[@]}" --max-batch-size "$MAX_BATCH_SIZE")
    PLANS=()
fi
OFFLINE_TRT=()
if ((ENABLE_TRT)); then
    RENDER+=(--set flow_runtime=tensorrt --set runtime=tensorrt)
    OFFLINE_TRT=(--enable-trt)
fi
OUT=${OUT:-$WORK/out/unet}
read -ra DATA <<<"$DATA"
read -ra OFFLINE_DATA <<<"$OFFLINE_DATA"

read_stages -1 7 "$@"
case $MODE in
streaming) ;;
offline) RENDER+=(--offline) ;;
*) echo "the third argument is streaming or offline, not '$MODE'" >&2 && exit 2 ;;
esac

if stage -1 "check the machine"; then
    "$PYTHON" scripts/doctor.py "$MODELS" --stack unet "${RENDER[@]}" --disk 6 \
        --ports "$HTTP_PORT" "$GRPC_PORT" "$METRICS_PORT" "$HEALTH_PORT"
fi

if stage 0 "download the checkpoints"; then
    "$PYTHON" -m cosyvoice_triton prepare "${CHECKPOINTS[@]}" "$MODELS"
fi

if stage 1 "try the LLM"; then
    [[ -z ${ENGINE[*]} ]] || "$PYTHON" -m cosyvoice_triton prepare engine "$MODELS" "${ENGINE[@]}"
    "$ENGINE_PYTHON" -m cosyvoice_triton test-llm --tokenizer_dir "$MODELS/cosyvoice2_llm" "${LLM_TEST[@]}" \
        --max_tokens 50
fi

if stage 2 "render the model repository, $MODE"; then
    "$PYTHON" -m cosyvoice_triton render "$MODELS" "$REPOSITORY" --stack unet "${RENDER[@]}"
fi

if stage 3 "serve"; then
    start triton "$PYTHON" -m cosyvoice_triton serve "$REPOSITORY" --log-file "$LOGS/tritonserver.log" --http-port "$HTTP_PORT" \
        --grpc-port "$GRPC_PORT" --metrics-port "$METRICS_PORT" --health-port "$HEALTH_PORT"
    await triton "http://127.0.0.1:$HEALTH_PORT/ready"
    hold
fi

if stage 4 "one request over HTTP"; then
    if [[ $MODE == offline ]]; then
        "$PYTHON" -m cosyvoice_triton client-http --server-url "http://127.0.0.1:$HTTP_PORT" --model-name cosyvoice2 \
            --target-text "Hello from an HTTP request." "${VOICE[@]}" --output-audio "$OUT/http.wav"
    else
        echo "skipped: Triton's HTTP endpoint returns one answer per request; run: bash $0 2 4 offline"
    fi
fi

if stage 5 "gRPC benchmark, $NUM_TASKS tasks, $MODE"; then
    "$PYTHON" -m cosyvoice_triton client-grpc --server-addr 127.0.0.1 --server-port "$GRPC_PORT" --model-name cosyvoice2 \
        --num-tasks "$NUM_TASKS" --mode "$MODE" "${DATA[@]}" "${CACHED[@]}" --log-dir "$OUT/grpc_${MODE}_${NUM_TASKS}_tasks"
fi

if stage 6 "offline benchmark, without Triton"; then
    stop_servers # of stage 3
    start_llm
    "$PYTHON" -m cosyvoice_triton offline "${LLM_OPTIONS[@]}" \
        --llm-model-name-or-path "$MODELS/cosyvoice2_llm" --token2wav-path "$MODELS/CosyVoice2-0.5B" \
        --token2wav-batch-size 4 "${OFFLINE_DATA[@]}" "${OFFLINE_TRT[@]}" --output-dir "$OUT/offline"
fi

if stage 7 "build token2wav's TensorRT plans"; then
    "$PYTHON" -m cosyvoice_triton prepare plans "$MODELS" --stack unet "${PLANS[@]}"
fi
