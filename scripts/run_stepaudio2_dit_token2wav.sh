#!/usr/bin/env bash
# The dit stack in stages:  bash scripts/run_stepaudio2_dit_token2wav.sh START STOP
#
#   -1  check the machine                    4  gRPC benchmark
#    0  download the checkpoints             5  offline benchmark, LLM and token2wav in turn
#    1  try the LLM                          6  token2wav alone: whole, in chunks, and both compared
#    2  render the model repository          7  serve on several GPUs
#    3  serve                                8  benchmark that over numbers of GPUs and tasks
#    9  build token2wav's TensorRT plans; ENABLE_TRT=1 uses them in stages 2 to 8
#
# LLM=cuda, the default: our engine in each Triton; stage 7 serves the whole stack on each of TOKEN2WAV_GPUS.
# LLM=trtllm-serve, upstream's way, in the image `trtllm`: stage 1 builds TensorRT-LLM's engine, stages 3 and 7 start its
# server; stage 7 has the LLM on GPU 0 and token2wav on the others.
#
# Servers of stages 3 and 7 stop with the script; if one of these is the last stage, on Ctrl-C.
#
#   bash scripts/run_stepaudio2_dit_token2wav.sh 0 3            from nothing to a server, in the image `gpu`
#   bash scripts/run_stepaudio2_dit_token2wav.sh 4 4            benchmark running servers
#   LOCAL=1 bash scripts/run_stepaudio2_dit_token2wav.sh -1 8   everything on a CPU, with the demo voice
#
# Settings, from the environment: WORK MODELS REPOSITORY OUT LOGS PYTHON, HTTP_PORT GRPC_PORT METRICS_PORT HEALTH_PORT
# LLM_PORT, LLM, HUB (huggingface or modelscope), ENABLE_TRT MAX_BATCH_SIZE NUM_TASKS, TOKEN2WAV_GPUS INSTANCES_PER_GPU
# TASKS_PER_INSTANCE (stages 7 and 8; tasks: a list) and the first of their ports, TOKEN2WAV_HTTP_PORT TOKEN2WAV_GRPC_PORT
# TOKEN2WAV_METRICS_PORT TOKEN2WAV_HEALTH_PORT; DATA, OFFLINE_DATA and VOCODER_DATA (options that choose the benchmarks'
# texts and voices).

# shellcheck source-path=SCRIPTDIR source=stages.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/stages.sh"

LOCAL=${LOCAL:-0}
ENABLE_TRT=${ENABLE_TRT:-0}
HUB=${HUB:-huggingface}
HTTP_PORT=${HTTP_PORT:-18000} # an LLM server uses 8000
GRPC_PORT=${GRPC_PORT:-8001}
METRICS_PORT=${METRICS_PORT:-8002}
HEALTH_PORT=${HEALTH_PORT:-8003}
LLM_PORT=${LLM_PORT:-8000}
MAX_BATCH_SIZE=${MAX_BATCH_SIZE:-64}
NUM_TASKS=${NUM_TASKS:-2}
TOKEN2WAV_HTTP_PORT=${TOKEN2WAV_HTTP_PORT:-17000}
TOKEN2WAV_GRPC_PORT=${TOKEN2WAV_GRPC_PORT:-18000}
TOKEN2WAV_METRICS_PORT=${TOKEN2WAV_METRICS_PORT:-16000}
TOKEN2WAV_HEALTH_PORT=${TOKEN2WAV_HEALTH_PORT:-15000}
# Upstream runs 2, because each of its token2wav instances renders one stream at a time. Ours batches.
INSTANCES_PER_GPU=${INSTANCES_PER_GPU:-1}

if ((LOCAL)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores, and the demo's networks are small
    MODELS=${MODELS:-$WORK/models/demo}
    REPOSITORY=${REPOSITORY:-$WORK/build/dit_openai}
    DATA=${DATA:---manifest-path $SAMPLES/manifest.jsonl}
    OFFLINE_DATA=${OFFLINE_DATA:---manifest-path $SAMPLES/manifest.jsonl}
    VOCODER_DATA=$OFFLINE_DATA
    TOKEN2WAV_GPUS=${TOKEN2WAV_GPUS:-2} # servers of this one machine
    TASKS_PER_INSTANCE=${TASKS_PER_INSTANCE:-1 2}
    CHECKPOINTS=(demo)
    ENGINE=(--kind onnxruntime_genai)
    ENGINE_PYTHON=$PYTHON
    LLM_TEST=(--engine_dir "$MODELS/cosyvoice2_llm_genai")
    RENDER=(--device cpu) # each Triton has the LLM itself
    LLM_COMMAND=()
    LLM_OPTIONS=(--backend onnxruntime_genai --engine-dir "$MODELS/cosyvoice2_llm_genai" --batch-size 4)
    PLANS=(--capability 8.9) # to try it: they do not run on a CPU
else
    MODELS=${MODELS:-$WORK/models/official}
    REPOSITORY=${REPOSITORY:-$WORK/model_repo_cosyvoice2_dit}
    DATA=${DATA:---huggingface-dataset yuekai/seed_tts_cosy2 --split-name wenetspeech4tts}
    OFFLINE_DATA=${OFFLINE_DATA:---split-name wenetspeech4tts}
    VOCODER_DATA=${VOCODER_DATA:---huggingface-dataset-split wenetspeech4tts}
    TOKEN2WAV_GPUS=${TOKEN2WAV_GPUS:-3}
    TASKS_PER_INSTANCE=${TASKS_PER_INSTANCE:-1 2 3 4 5 6}
    CHECKPOINTS=(download --stack dit --hub "$HUB")
    use_llm cosyvoice2_llm trt_engines_bfloat16 trtllm-serve
    RENDER=(--device gpu "${LLM_RENDER[@]}")
    PLANS=()
fi
OFFLINE_TRT=()
if ((ENABLE_TRT)); then
    RENDER+=(--set flow_runtime=tensorrt --set runtime=tensorrt)
    OFFLINE_TRT=(--enable-trt)
fi
OUT=${OUT:-$WORK/out/dit}
TOKEN2WAV=$MODELS/Step-Audio-2-mini/token2wav
read -ra DATA <<<"$DATA"
read -ra OFFLINE_DATA <<<"$OFFLINE_DATA"
read -ra VOCODER_DATA <<<"$VOCODER_DATA"
read -ra TASKS_PER_INSTANCE <<<"$TASKS_PER_INSTANCE"

start_triton() { # NAME GPU HTTP GRPC METRICS HEALTH
    CUDA_VISIBLE_DEVICES=$2 start "$1" "$PYTHON" -m cosyvoice_triton serve "$REPOSITORY" --log-file "$LOGS/$1-tritonserver.log" \
        --http-port "$3" --grpc-port "$4" --metrics-port "$5" --health-port "$6"
}

read_stages -1 9 "$@"

if stage -1 "check the machine"; then
    "$PYTHON" scripts/doctor.py "$MODELS" --stack dit "${RENDER[@]}" --disk 6 \
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

if stage 2 "render the model repository"; then
    "$PYTHON" -m cosyvoice_triton render "$MODELS" "$REPOSITORY" --stack dit "${RENDER[@]}"
fi

if stage 3 "serve"; then
    start_llm
    start_triton triton 0 "$HTTP_PORT" "$GRPC_PORT" "$METRICS_PORT" "$HEALTH_PORT"
    await triton "http://127.0.0.1:$HEALTH_PORT/ready"
    hold
fi

if stage 4 "gRPC benchmark, $NUM_TASKS tasks"; then
    "$PYTHON" -m cosyvoice_triton client-grpc --server-addr 127.0.0.1 --server-port "$GRPC_PORT" --model-name cosyvoice2_dit \
        --num-tasks "$NUM_TASKS" --mode streaming "${DATA[@]}" --log-dir "$OUT/grpc_streaming_${NUM_TASKS}_tasks"
fi

if stage 5 "offline benchmark, LLM and token2wav in turn"; then
    "$PYTHON" -m cosyvoice_triton offline "${LLM_OPTIONS[@]}" --llm-model-name-or-path "$MODELS/cosyvoice2_llm" \
        --token2wav-path "$TOKEN2WAV" --token2wav-batch-size 4 "${OFFLINE_DATA[@]}" "${OFFLINE_TRT[@]}" \
        --output-dir "$OUT/offline"
fi

if stage 6 "token2wav alone"; then
    "$PYTHON" -m cosyvoice_triton token2wav --model-dir "$TOKEN2WAV" "${VOCODER_DATA[@]}" "${OFFLINE_TRT[@]}" --warmup 3 \
        --output-dir "$OUT/token2wav"
    for strategy in equal exponential; do
        "$PYTHON" -m cosyvoice_triton streaming --model-dir "$TOKEN2WAV" "${VOCODER_DATA[@]}" "${OFFLINE_TRT[@]}" \
            --strategy "$strategy" --output-dir "$OUT/streaming_$strategy"
    done
fi

if stage 7 "serve on $TOKEN2WAV_GPUS GPUs, $INSTANCES_PER_GPU x token2wav on each, beside that of an LLM server"; then
    stop_server triton # of stage 3, whose LLM server stays
    start_llm
    first_gpu=$((${#LLM_COMMAND[@]} > 0))
    for ((i = 0; i < TOKEN2WAV_GPUS * INSTANCES_PER_GPU; i++)); do
        start_triton "token2wav-$i" $((first_gpu + i / INSTANCES_PER_GPU)) $((TOKEN2WAV_HTTP_PORT + i)) \
            $((TOKEN2WAV_GRPC_PORT + i)) $((TOKEN2WAV_METRICS_PORT + i)) $((TOKEN2WAV_HEALTH_PORT + i))
    done
    for ((i = 0; i < TOKEN2WAV_GPUS * INSTANCES_PER_GPU; i++)); do
        await "token2wav-$i" "http://127.0.0.1:$((TOKEN2WAV_HEALTH_PORT + i))/ready"
    done
    hold
fi

if stage 8 "benchmark of these servers"; then
    for ((gpus = 1; gpus <= TOKEN2WAV_GPUS; gpus++)); do
        servers=()
        for ((i = 0; i < gpus * INSTANCES_PER_GPU; i++)); do servers+=("127.0.0.1:$((TOKEN2WAV_GRPC_PORT + i))"); done
        "$PYTHON" -m cosyvoice_triton bench load --server "${servers[@]}" --token2wav-gpus "$gpus" --llm-gpus $((${#LLM_COMMAND[@]} > 0)) \
            --model-name cosyvoice2_dit --concurrency "${TASKS_PER_INSTANCE[@]}" "${DATA[@]}" \
            --title "disaggregated, $gpus x $INSTANCES_PER_GPU token2wav" --output "$OUT/disaggregated_${gpus}_gpus"
    done
fi

if stage 9 "build token2wav's TensorRT plans"; then
    "$PYTHON" -m cosyvoice_triton prepare plans "$MODELS" --stack dit "${PLANS[@]}"
fi
