#!/bin/bash
# First process of the gateway: runs Envoy with envoy.yaml. On a stop live streams may end, for ten minutes at most; Envoy
# by itself would break them.
#
#   run.sh [CONFIGURATION [ADMIN_PORT]]
#   run.sh servers          prints how many Triton servers get requests; fails if none does
config=${1:-/etc/envoy/envoy.yaml} port=${2:-9901}

# admin METHOD PATH: prints the answer of Envoy's administration page
admin() {
    exec 3<>"/dev/tcp/127.0.0.1/$port" \
        && printf '%s %s HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n' "$1" "$2" >&3 && cat <&3
} 2>/dev/null

# number STATISTIC: the first one that is not 0
number() { admin GET "/stats?filter=^$1\$" | sed -n 's/.*: \([1-9][0-9]*\).*/\1/p' | grep -m 1 .; }

if [[ $config == servers ]]; then
    number 'cluster\.tts_grpc\.membership_healthy' || { echo 0 && exit 1; }
    exit
fi

stop() {
    trap '' TERM INT
    # For a second clients are told to connect elsewhere; then nothing new is accepted.
    admin POST '/drain_listeners?graceful' >/dev/null
    SECONDS=0
    sleep 1.2
    while number 'http\.(grpc|http|speech)\.downstream_rq_active' >/dev/null && ((SECONDS < 600)); do sleep 0.2; done
    kill "$envoy"
    wait "$envoy"
    exit 0
}

envoy --config-path "$config" --disable-hot-restart --file-flush-interval-msec 1000 --drain-time-s 1 \
    --drain-strategy immediate &
envoy=$!
trap stop TERM INT
wait "$envoy"
