guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=shapes \
    --tokenizer kind=hf_auto,model=src/afferent/builtin/models/shapes \
    --data kind=synthetic_text,prompt_tokens=32 \
    --data kind=synthetic_image,width=320,height=240,output_tokens=16 \
    --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=16 \
    --disable-console-interactive --output kind=json,path="$(mktemp -d)/guidellm.json"
