# Sourced by run.sh, run_stepaudio2_dit_token2wav.sh and run_cosyvoice3.sh: numbered stages, servers that stop with the script.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
# A checkout's own package, whatever the Python has installed; the images have it installed only.
[[ ! -d common ]] || export PYTHONPATH=$PWD/common${PYTHONPATH:+:$PYTHONPATH}
WORK=${WORK:-.} # everything that the stages write is below it, unless a setting names another place
# shellcheck disable=SC2034  # the scripts read it
SAMPLES=$("$PYTHON" -c 'import cosyvoice_triton.samples as samples; print(samples.__path__[0])')
LOGS=${LOGS:-$WORK/out/logs}
READY_SECONDS=${READY_SECONDS:-1800}

declare -A SERVERS=() # process by name
STAGE=
STAGE_STOP=

# Prints the comment at the top of the calling script.
usage() { sed -n '2,/^$/{s/^# \{0,1\}//p}' "$0"; }

# Reads START and STOP from the script's arguments; FIRST and LAST are the first and last stage that exist.
read_stages() { # FIRST LAST [START STOP ...]
    local first=$1 last=$2
    shift 2
    if [[ ${1:-} == -h || ${1:-} == --help ]]; then
        usage
        exit 0
    fi
    if ! [[ ${1:-} =~ ^-?[0-9]+$ && ${2:-} =~ ^-?[0-9]+$ ]] || (($1 < first || $2 > last || $1 > $2)); then
        echo "START and STOP are stages from $first to $last, START first; not '${1:-}' '${2:-}'. See: bash $0 --help" >&2
        exit 2
    fi
    STAGE_START=$1 STAGE_STOP=$2
    mkdir -p "$LOGS" || {
        echo "stages write to WORK, which is $WORK: set it to a directory that you may write" >&2
        exit 1
    }
    trap at_exit EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

stage() { # NUMBER TITLE: succeeds if the stage is selected
    (($1 >= STAGE_START && $1 <= STAGE_STOP)) || return 1
    STAGE=$1
    echo "=== stage $1: $2"
}

# Starts a server in the background; its output goes to $LOGS/NAME.log.
start() { # NAME COMMAND...
    local name=$1
    shift
    echo "starting $name, log: $LOGS/$name.log"
    "$@" >"$LOGS/$name.log" 2>&1 &
    SERVERS[$name]=$!
}

await() { # NAME URL: waits until it is ready; if it fails, prints the end of its log
    "$PYTHON" -m cosyvoice_triton wait --process "${SERVERS[$1]}" --seconds "$READY_SECONDS" "$2" && return
    tail -n 20 "$LOGS/$1.log" >&2
    echo "$1 did not become ready; its log: $LOGS/$1.log" >&2
    return 1
}

# Sets what the stages need of the LLM on a GPU, as LLM chooses: `cuda` is our engine, which reads the LLM's directory in
# each Triton; TensorRT-LLM, upstream's way, serves an engine that stage 1 builds.
# shellcheck disable=SC2034  # the scripts read them
use_llm() { # DIRECTORY ENGINE WAY: in MODELS; trtllm-serve or trtllm-backend
    local own=$1 engine=$2 way=$3
    case ${LLM:-cuda} in
    cuda)
        ENGINE=()
        ENGINE_PYTHON=$PYTHON
        LLM_TEST=(--engine cuda --engine_dir "$MODELS/$own")
        LLM_RENDER=(--llm-engine cuda)
        LLM_COMMAND=()
        LLM_OPTIONS=(--backend hf --batch-size 16)
        ;;
    "$way")
        ENGINE=(--kind tensorrt_llm --max-batch-size "$MAX_BATCH_SIZE")
        ENGINE_PYTHON=${TRTLLM_PYTHON:-$PYTHON} # in the image another Python has TensorRT-LLM
        LLM_TEST=(--engine_dir "$MODELS/$engine")
        LLM_RENDER=(--llm-transport openai --llm-urls "http://127.0.0.1:$LLM_PORT/v1" --llm-model "$engine")
        [[ $way == trtllm-serve ]] || LLM_RENDER=(--llm-backend tensorrtllm)
        LLM_COMMAND=(trtllm-serve "$MODELS/$engine" --tokenizer "$MODELS/$own"
            --host 127.0.0.1 --port "$LLM_PORT" --max_batch_size "$MAX_BATCH_SIZE" --kv_cache_free_gpu_memory_fraction 0.4)
        LLM_OPTIONS=(--backend trtllm-serve --openai-model-name "$engine" --batch-size 16
            --openai-api-base "http://127.0.0.1:$LLM_PORT/v1")
        ;;
    *) echo "LLM is cuda or $way, not '$LLM'" >&2 && exit 2 ;;
    esac
}

# The LLM's server, of the settings LLM_COMMAND (empty: Triton has the LLM itself) and LLM_PORT, on GPU 0. One that an
# earlier stage started is kept.
start_llm() {
    [[ -z ${SERVERS[llm]:-} ]] && ((${#LLM_COMMAND[@]})) || return 0
    CUDA_VISIBLE_DEVICES=0 start llm "${LLM_COMMAND[@]}"
    await llm "http://127.0.0.1:$LLM_PORT/health"
}

stop_server() { # NAME: if it was started
    [[ -n ${SERVERS[$1]:-} ]] || return 0
    kill -s TERM "${SERVERS[$1]}" 2>/dev/null || true
    wait "${SERVERS[$1]}" 2>/dev/null || true
    unset "SERVERS[$1]"
}

stop_servers() {
    local name
    for name in "${!SERVERS[@]}"; do kill -s TERM "${SERVERS[$name]}" 2>/dev/null || true; done
    for name in "${!SERVERS[@]}"; do wait "${SERVERS[$name]}" 2>/dev/null || true; done
    SERVERS=()
}

# If the stage that started servers is the last one: waits for Ctrl-C, or until one of them exits.
hold() {
    ((STAGE == STAGE_STOP)) || return 0
    echo "serving; Ctrl-C to stop"
    wait -n "${SERVERS[@]}" || true
    echo "a server has exited; logs: $LOGS" >&2
    return 1
}

at_exit() {
    local code=$?
    trap - EXIT INT TERM
    if ((code != 0 && code != 130 && code != 143)); then
        echo "stage $STAGE failed with code $code; logs of servers: $LOGS" >&2
    fi
    stop_servers
    exit "$code"
}
