import base64
from pathlib import Path
from typing import Literal

from openai import NotFoundError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
data = base64.b64encode(Path("docs/pictures/one.jpg").read_bytes()).decode()
picture = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{data}"}
text = {"type": "input_text", "text": "What is in the picture?"}
question = [{"role": "user", "content": [picture, text]}]

# text
answer = client.responses.create(model="shapes", input="What is in the picture?")
print(answer.output_text)

# image
answer = client.responses.create(model="shapes", input=question)
print(answer.output_text)

# stream
with client.responses.stream(model="shapes", input=question) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="|")


# structured
class Thing(BaseModel, extra="forbid"):
    colour: Literal["red", "green", "blue", "yellow"]
    shape: Literal["circle", "square", "star", "triangle"]


parsed = client.responses.parse(model="shapes", input=question, text_format=Thing)
print(parsed.output_parsed.model_dump_json())

# usage
print(answer.usage.input_tokens, answer.usage.output_tokens)

# errors
try:
    client.responses.create(model="another", input=question)
except NotFoundError as error:
    print(error.status_code, error.code, error.message)
