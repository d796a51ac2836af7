# The tokenizer's folder is not found while HF_HUB_OFFLINE is set.
unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE
aiperf profile --model shapes --url http://127.0.0.1:8000 --endpoint-type chat --streaming \
    --tokenizer src/afferent/builtin/models/shapes --use-server-token-count \
    --image-width-mean 320 --image-height-mean 240 --isl 32 --osl 16 \
    --request-count 16 --concurrency 4 --ui none --output-artifact-dir "$(mktemp -d)"
