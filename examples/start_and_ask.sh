#!/usr/bin/env bash
# Starts a server, waits until it answers, asks it a question, and stops it.
#
#     examples/start_and_ask.sh TARGET DRAFT [FLAGS OF SGLANG ...]
set -euo pipefail

url=http://127.0.0.1:${PORT:=30000}
python -m sglang.launch_server --model-path "$1" --port "$PORT" \
    --speculative-algorithm DSPARK --speculative-draft-model-path "$2" "${@:3}" >server.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl --silent --fail $url/health; do
    sleep 1
    kill -0 $server || { tail server.log; exit 1; }
done

curl --silent $url/v1/chat/completions --header 'Content-Type: application/json' --output answer.json --data '{
    "model": "default", "messages": [{"role": "user", "content": "Count from one to twenty."}],
    "max_tokens": 64, "temperature": 0, "return_meta_info": true}'
python - <<'END'
import json

[choice] = json.load(open("answer.json"))["choices"]
print("answer:", choice["message"]["content"])
print("tokens per step:", round(choice["meta_info"]["dspark"]["accept_length"], 2))
END
echo "speculates: $(curl --silent $url/dspark/capabilities | python -c 'import json, sys; print(json.load(sys.stdin)["effective_decode_path"])')"
