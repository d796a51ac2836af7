export LLM_USER_PATH=$(mktemp -d)
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: shapes
  model_name: shapes
  api_base: http://127.0.0.1:8000/v1
  vision: true
  supports_schema: true
  supports_tools: true
- model_id: another
  model_name: another
  api_base: http://127.0.0.1:8000/v1
END
question="What is in the picture?"

# text
llm -m shapes "$question"

# image
llm -m shapes "$question" -a docs/pictures/one.jpg --no-stream

# stream
llm -m shapes "$question" -a docs/pictures/one.jpg

# structured
thing='{"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue", "yellow"]},
  "shape": {"enum": ["circle", "square", "star", "triangle"]}}, "required": ["colour", "shape"],
  "additionalProperties": false}'
llm -m shapes "$question" -a docs/pictures/one.jpg --schema "$thing"

# tool
functions='
def report_colour(colour: str) -> str:
    """Report the colour of the picture."""
    print(f"{colour=}")
    return "ok"
'
llm -m shapes "Report the colour of the picture." -a docs/pictures/one.jpg --functions "$functions"

# usage
llm -m shapes "$question" -a docs/pictures/one.jpg --usage 2>&1 >/dev/null

# errors
llm -m another "$question" 2>&1 || true
