#!/usr/bin/env bash
# A Docker engine of our own, for tests and measurements: own socket, data root and pid file; no bridge, no iptables rule,
# no forwarding, so that the host's network stays as it was. Root only; Debian and Ubuntu.
#   eval "$(scripts/docker_engine.sh start)"     installs the distribution's engine if there is none, starts it, sets DOCKER_HOST
#   scripts/docker_engine.sh stop                ends it by its pid file and removes its data
# RSI_DOCKER_DIR     where it lives (default: rsi-docker in the temporary directory). Needs room for images on a real
#                    file system (overlay2 does not stack on overlayfs) and a short path (a socket's has 107 characters).
set -euo pipefail
dir=$(realpath -m "${RSI_DOCKER_DIR:-${TMPDIR:-/tmp}/rsi-docker}")
socket=$dir/docker.sock
pidfile=$dir/dockerd.pid

say() { printf '%s\n' "$*" >&2; }

answers() {
    python3 - "$socket" <<'PYTHON' 2>/dev/null
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(2)
    connection.connect(sys.argv[1])
    connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
    sys.exit(b" 200 " not in connection.recv(100))
PYTHON
}

install_engine() {
    if command -v dockerd >/dev/null; then return; fi
    if ! command -v apt-get >/dev/null; then
        say "no dockerd on PATH and no apt-get to install it; install the engine of your distribution"
        return 1
    fi
    say "installing the distribution's docker.io"
    # A package that starts the system's own daemon would put a bridge and iptables rules on this host.
    local policy=/usr/sbin/policy-rc.d ours=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && ours=1
    fi
    export DEBIAN_FRONTEND=noninteractive
    local apt=(apt-get -q -o DPkg::Lock::Timeout=500) status=0
    { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends docker.io; } >&2 || status=$?
    if [ -n "$ours" ]; then rm -f "$policy"; fi
    return "$status"
}

start() {
    if answers; then say "the engine at $socket runs already"; return; fi
    if [ "$(id -u)" != 0 ]; then say "the engine needs root; or set DOCKER_HOST to one that runs"; return 1; fi
    if [ "${#socket}" -gt 107 ]; then say "$socket is too long for a socket; set RSI_DOCKER_DIR to a shorter path"; return 1; fi
    install_engine
    mkdir -p "$dir"
    rm -f "$pidfile" "$socket"
    local options=(
        --host "unix://$socket" --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$pidfile"
        --containerd-namespace rsi --containerd-plugins-namespace rsi-plugins
        --bridge=none --iptables=false --ip6tables=false --ip-forward=false
    )
    setsid nohup dockerd "${options[@]}" >"$dir/dockerd.log" 2>&1 </dev/null &
    local pid=$!
    for _ in $(seq 300); do
        if answers; then return; fi
        if ! kill -0 "$pid" 2>/dev/null; then break; fi
        sleep 0.2
    done
    say "the engine did not start; the end of $dir/dockerd.log:"
    tail -20 "$dir/dockerd.log" >&2
    return 1
}

stop() {
    local pid
    if pid=$(cat "$pidfile" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
        kill "$pid"
        for _ in $(seq 300); do
            if [ ! -e "/proc/$pid" ]; then break; fi
            # Without an init that reaps, an ended daemon stays as a zombie.
            if grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2>/dev/null; then break; fi
            sleep 0.1
        done
    fi
    # Mounts that outlive the daemon keep its directory from being removed.
    awk -v top="$dir/" 'index($5, top) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r mount; do
        umount "$mount" || umount -l "$mount"
    done
    rm -rf "$dir"
}

case ${1:-} in
start) start && printf 'export DOCKER_HOST=unix://%s\n' "$socket" ;;
stop) stop ;;
*) say "usage: scripts/docker_engine.sh start|stop"; exit 2 ;;
esac
