#!/bin/sh
# First process of the gateway: runs nginx and keeps its list of servers true.
#
#   TTS_SERVERS     "host[:http[:grpc[:health]]] ...", default ports 8000 8001 8003; every address of a name is a server
#   SPEECH_SERVERS  "host[:port] ...", default port 10086; may be empty
#   PROBE_SECONDS   between two looks at all of them (1)
#   NGINX_CONF, RUN_DIR   for tests
#
# nginx knows a server as dead only when a connection to it fails. One that is being stopped, or whose model has died,
# still accepts them, and with least_conn it would even get most of the new streams. So each server's health page is
# asked, and when an answer changes nginx is given the servers that are ready: its old workers finish their streams.
set -eu

TTS_SERVERS=${TTS_SERVERS:?names the speech servers, such as TTS_SERVERS=tts}
SPEECH_SERVERS=${SPEECH_SERVERS:-}
PROBE_SECONDS=${PROBE_SECONDS:-1}
NGINX_CONF=${NGINX_CONF:-/etc/nginx/nginx.conf}
RUN_DIR=${RUN_DIR:-/tmp/nginx}

mkdir -p "$RUN_DIR/ready"

# probe FILE URL LINE: LINE into FILE if the page at URL says 200
probe() {
    if curl --silent --fail --connect-timeout 1 --max-time 5 --output /dev/null "$2"; then echo "$3" >"$1"; fi
}

addresses() {
    getent ahostsv4 "$1" | awk '$2 == "STREAM" { print $1 }' | sort -u
}

# Everything that is ready, "tts ADDRESS HTTP GRPC" or "speech ADDRESS PORT" a line; all are asked at once. For a
# subshell, because it waits for all its children, of which nginx must not be one.
ready_servers() {
    rm -f "$RUN_DIR"/ready/*
    for server in $TTS_SERVERS; do
        IFS=: read -r host http grpc health <<END
$server
END
        for address in $(addresses "$host"); do
            probe "$RUN_DIR/ready/tts-$address-${grpc:=8001}" "http://$address:${health:=8003}/ready" \
                "tts $address ${http:=8000} $grpc" &
        done
    done
    for server in $SPEECH_SERVERS; do
        IFS=: read -r host port <<END
$server
END
        for address in $(addresses "$host"); do
            probe "$RUN_DIR/ready/speech-$address-${port:=10086}" "http://$address:$port/health" \
                "speech $address $port" &
        done
    done
    wait
    cat "$RUN_DIR"/ready/* 2>/dev/null || true
}

# upstream NAME FIELD KIND: those of KIND, with the port in FIELD; one that never answers where there are none, because
# nginx wants at least one
upstream() {
    echo "upstream $1 { zone $1 256k; least_conn;"
    awk -v field="$2" -v kind="$3" '
        $1 == kind { print "    server " $2 ":" $field " max_fails=1 fail_timeout=2s;"; some = 1 }
        END { if (!some) print "    server 127.0.0.1:1 down;" }' "$RUN_DIR/servers"
    echo "}"
}

# Whether the list of servers has changed; writes upstreams.conf from it.
changed() {
    servers=$(ready_servers)
    if [ -f "$RUN_DIR/upstreams.conf" ] && [ "$servers" = "$(cat "$RUN_DIR/servers")" ]; then return 1; fi
    echo "$servers" >"$RUN_DIR/servers"
    {
        upstream tts_http 3 tts
        upstream tts_grpc 4 tts
        upstream speech 3 speech
    } >"$RUN_DIR/upstreams.conf"
    echo "ready: $(echo "$servers" | tr '\n' ';')" >&2
}

changed || true
nginx -c "$NGINX_CONF" -g 'daemon off;' &
nginx=$!
# New connections are refused at once, live streams go on until worker_shutdown_timeout.
trap 'kill -s QUIT "$nginx"; wait "$nginx"; exit 0' TERM INT

while sleep "$PROBE_SECONDS"; do
    if ! kill -s 0 "$nginx" 2>/dev/null; then
        echo "nginx has ended; its words are above" >&2
        exit 1
    fi
    if changed; then kill -s HUP "$nginx"; fi
done
