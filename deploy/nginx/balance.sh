#!/bin/sh
# First process of the gateway: runs nginx and keeps its list of servers up to date.
#
#   TTS_SERVERS     "host[:http[:grpc[:health]]] ...", default ports 8000 8001 8003; every address of a name is a server
#   SPEECH_SERVERS  "host[:port] ...", default port 10086; may be empty
#   PROBE_SECONDS   interval between two checks of all servers (1)
#   NGINX_CONF, RUN_DIR   for tests
#
# nginx recognises a dead server only by failed connections. A server that is being stopped, or whose model has died,
# still accepts connections, and with least_conn it would even get most of the new streams. This script therefore requests
# each server's health page, and reloads nginx with the ready servers when an answer changes; old workers finish their
# streams.
set -eu

TTS_SERVERS=${TTS_SERVERS:?names the speech servers, such as TTS_SERVERS=tts}
SPEECH_SERVERS=${SPEECH_SERVERS:-}
PROBE_SECONDS=${PROBE_SECONDS:-1}
NGINX_CONF=${NGINX_CONF:-/etc/nginx/nginx.conf}
RUN_DIR=${RUN_DIR:-/tmp/nginx}

mkdir -p "$RUN_DIR/ready" "$RUN_DIR/names"

# Docker stops nginx's image by SIGQUIT. Until the live streams have ended, or worker_shutdown_timeout, new requests are
# answered as if no server were ready; nginx alone would close its ports at once, and clients see broken connections.
nginx=
stop() {
    trap '' TERM INT QUIT
    if [ -n "$nginx" ]; then
        old=$(cat "/proc/$nginx/task/$nginx/children" 2>/dev/null || true)
        : >"$RUN_DIR/servers"
        upstreams
        if nginx -q -t -c "$NGINX_CONF" && kill -s HUP "$nginx"; then
            # shellcheck disable=SC2086  # several words
            while running $old; do sleep 0.1; done
        fi
        kill -s QUIT "$nginx" && wait "$nginx" || true
    fi
    exit 0
}

# running PID ...: succeeds if one of them is
running() {
    for process; do
        if [ -d "/proc/$process" ]; then return 0; fi
    done
    return 1
}

trap stop TERM INT QUIT

# probe FILE URL LINE: writes LINE to FILE if URL returns 200
probe() {
    if curl --silent --fail --connect-timeout 1 --max-time 5 --output /dev/null "$2"; then echo "$3" >"$1"; fi
}

# The addresses of a name; the last known ones if it does not resolve within a second. They are probed in any case.
addresses() {
    if found=$(timeout 1 getent ahostsv4 "$1"); then
        found=$(echo "$found" | awk '$2 == "STREAM" { print $1 }' | sort -u)
        echo "$found" >"$RUN_DIR/names/$1"
        echo "$found"
    elif [ $? -eq 124 ]; then
        cat "$RUN_DIR/names/$1" 2>/dev/null || true
    fi
}

# tts HOST HTTP GRPC HEALTH, speech HOST PORT: probe every address of the host
tts() {
    for address in $(addresses "$1"); do
        probe "$RUN_DIR/ready/tts-$address-$3" "http://$address:$4/ready" "tts $address $2 $3" &
    done
    wait
}

speech() {
    for address in $(addresses "$1"); do
        probe "$RUN_DIR/ready/speech-$address-$2" "http://$address:$2/health" "speech $address $2" &
    done
    wait
}

# Prints a line for each ready server, "tts ADDRESS HTTP GRPC" or "speech ADDRESS PORT"; names are resolved and addresses
# probed in parallel. Must run in a subshell, because it waits for all its children, and nginx must not be one of them.
ready_servers() {
    rm -f "$RUN_DIR"/ready/*
    for server in $TTS_SERVERS; do
        IFS=: read -r host http grpc health <<END
$server
END
        tts "$host" "${http:-8000}" "${grpc:-8001}" "${health:-8003}" &
    done
    for server in $SPEECH_SERVERS; do
        IFS=: read -r host port <<END
$server
END
        speech "$host" "${port:-10086}" &
    done
    wait
    cat "$RUN_DIR"/ready/* 2>/dev/null || true
}

# upstream NAME FIELD KIND: the servers of KIND, with the port in FIELD. If there are none, one that never answers,
# because nginx requires at least one.
upstream() {
    echo "upstream $1 { zone $1 256k; least_conn;"
    awk -v field="$2" -v kind="$3" '
        $1 == kind { print "    server " $2 ":" $field " max_fails=1 fail_timeout=2s;"; some = 1 }
        END { if (!some) print "    server 127.0.0.1:1 down;" }' "$RUN_DIR/servers"
    echo "}"
}

upstreams() {
    {
        upstream tts_http 3 tts
        upstream tts_grpc 4 tts
        upstream speech 3 speech
    } >"$RUN_DIR/upstreams.conf"
}

# Succeeds if the list of servers has changed; writes it to upstreams.conf.
changed() {
    servers=$(ready_servers)
    if [ -f "$RUN_DIR/upstreams.conf" ] && [ "$servers" = "$(cat "$RUN_DIR/servers")" ]; then return 1; fi
    echo "$servers" >"$RUN_DIR/servers"
    upstreams
    echo "ready: $(echo "$servers" | tr '\n' ';')" >&2
}

changed || true
nginx -c "$NGINX_CONF" -g 'daemon off;' &
nginx=$!

while sleep "$PROBE_SECONDS"; do
    if ! kill -s 0 "$nginx" 2>/dev/null; then
        echo "nginx has exited; its output is above" >&2
        exit 1
    fi
    if changed; then kill -s HUP "$nginx"; fi
done
