#!/bin/sh
# A whole producer for gllm with nothing but redis-cli (7.0 or newer). See docs/protocol.md.
#
#   producer.sh submit ID JSON [FIELD VALUE]...   add a job; doing it again with the same ID is safe
#   producer.sh read ID [LAST]                    print its events as they come, one JSON line each, up to the last one;
#                                                 LAST: the entry behind which to go on
#   producer.sh cancel ID                         ask for its end
#
# For the text alone: producer.sh read ID | jq --unbuffered -j '.text // empty'
# Environment: REDIS_URL, QUEUE, PRIORITY (high, normal or low).
set -eu

url=${REDIS_URL:-redis://localhost:6379/0}
base="gllm:{${QUEUE:-default}}:"
end=9007199254740991-0 # the entry id of every last event

redis() { redis-cli -u "$url" --no-auth-warning -e --raw "$@"; }

submit() {
    id=$1 body=$2
    shift 2
    redis XADD "${base}jobs:${PRIORITY:-normal}:0" '*' id "$id" body "$body" "$@" >/dev/null
}

# Lost connections and servers that start or fail over pass: half a minute of errors in a row is too much.
read_reply() {
    id=$1 last=${2:-0-0} failures=0
    trap 'echo "interrupted; the job goes on. Read on: $0 read $id $last" >&2; exit 130' INT TERM
    while [ "$last" != "$end" ]; do
        if entries=$(redis XREAD COUNT 100 BLOCK 1000 STREAMS "${base}out:$id" "$last"); then
            failures=0
            show "$entries"
        else
            failures=$((failures + 1))
            [ "$failures" -lt 30 ] || exit 1
            sleep 1
        fi
    done
}

# The lines are the stream's name, then three for each entry: its id, the letter d, and the event.
show() {
    [ -n "$1" ] || refuse_expired
    while read -r entry && read -r _ && read -r event; do
        printf '%s\n' "$event"
        last=$entry
    done <<LINES
$(printf '%s\n' "$1" | tail -n +2)
LINES
}

refuse_expired() {
    [ "$(redis HGET "${base}job:$id" state)" = ended ] || return 0
    [ "$(redis EXISTS "${base}out:$id")" = 0 ] || return 0
    echo "job $id has ended and its reply is no longer kept" >&2
    exit 1
}

case ${1:-} in
submit) shift && submit "$@" ;;
read) shift && read_reply "$@" ;;
cancel) redis SET "${base}cancel:$2" 1 EX 86400 >/dev/null ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
